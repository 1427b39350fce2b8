"""The messages and services of protos/callboard/v1. Everything else here is made by scripts/protos."""

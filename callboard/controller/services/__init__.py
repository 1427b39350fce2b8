"""The gRPC services, a module each: messages in, events or questions to the driver."""

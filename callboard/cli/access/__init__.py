"""Access to controllers: certificates and contexts."""

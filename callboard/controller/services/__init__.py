"""What can be asked of the controller? One module per gRPC service; messages in, events or questions to the driver."""

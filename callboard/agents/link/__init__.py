"""The link to the controller: the stream, the outbox, the lease, and the fence for when it is lost."""

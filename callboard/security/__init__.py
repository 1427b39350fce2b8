"""Security: who is calling, what each role may do, and how the two ends of a connection show that to each other.

Knows gRPC and files, and nothing of jobs, nodes or decisions. `cryptography` and `pyjwt` are imported only where a
certificate or a signed token is handled, so that the command line starts as fast as before.
"""

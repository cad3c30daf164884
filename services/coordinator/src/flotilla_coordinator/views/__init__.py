"""Read-only answers, each by one function: for gRPC, and for commands where no coordinator answers.

Invariants: nothing is written or changed here. An answer is the message that a client of the coordinator gets, so that
whoever prints it need not know who answered.
"""

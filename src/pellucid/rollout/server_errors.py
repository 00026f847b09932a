"""The errors of sampler servers: a lost server costs its rows, which go to the others."""


class ServerLostError(Exception):
    """A server does not respond, or responds with weights other than those of the last push."""


class InvalidAnswerError(ServerLostError):
    """A server sent a malformed response."""

    def __init__(self, fault: str) -> None:
        super().__init__(f"it sent an invalid response: {fault}")

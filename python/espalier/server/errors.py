# SPDX-License-Identifier: Apache-2.0
"""What the server answers where a request cannot be served."""


class Refused(Exception):
    """A request that cannot be served as it is: answered with this HTTP status, or as the error of its future if it has one."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status

"""`pace serve`: the report, live. One drops a picture and sees its concepts, takes concepts away and sees what is predicted."""

from pace.serving.application import listening, serve
from pace.serving.session import Session

__all__ = ["Session", "listening", "serve"]

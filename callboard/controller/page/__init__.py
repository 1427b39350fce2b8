"""The web page: what the cluster is and does, live in a browser, with the actions that the reader's role allows."""


class PageUnavailable(Exception):
    """The page can't be served; the text says why and what to do."""

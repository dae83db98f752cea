"""The web page: one document that needs nothing from elsewhere, and the headers it is served with."""

from outrider.server.page.document import Page, page

__all__ = ["Page", "page"]

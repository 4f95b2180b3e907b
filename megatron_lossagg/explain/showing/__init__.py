"""An explanation in a terminal, a picture or a page."""

"""Tools that measure mdcs itself, for its developers: `mdcs dev NAME`."""

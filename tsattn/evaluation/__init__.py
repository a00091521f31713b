"""Measuring on a real model: texts and pass keys, one prefill for many configurations, quality and bytes.

``options`` checks what a command line gives; ``model`` fetches the model; ``haystack`` builds texts; ``reading`` prefills;
``chunk`` scores a text under teacher forcing, a page list for every query; ``policies`` says which pages are read.
"""

INSTALL = '`make demo` installs it; by hand, in a clone of tsattn: `pip install ".[demo]"`'
"""What to do when a package that only models and figures need is missing."""

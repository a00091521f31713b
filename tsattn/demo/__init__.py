"""``python -m tsattn demo``: a real model reads a long text and answers, densely and over selected pages.

``options`` holds the options and their checks, ``cli`` the order of events; ``answers`` decodes; ``measure`` times attention
and weighs what was read; ``report`` and ``picture`` show the result. Texts and models are those of ``tsattn.evaluation``.
"""

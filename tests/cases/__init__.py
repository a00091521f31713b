"""Small cases from public reports of faults in systems of this kind; the number in a test's name is the case's.

Expected values never rest on the report: they are derived beside the test. The counting trick: q = 0 makes all weights equal,
so with V[t] = t the output is the mean of the visible positions and the LSE is the log of their number.
"""

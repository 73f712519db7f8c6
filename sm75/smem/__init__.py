"""What Triton's kernels take on the target, found ahead of time on a CPU.

``report.run_and_print`` is the whole of ``verify --smem``. The modules:

* ``models``: shapes of attention layers and experts, with their sources
* ``cases``: calls of the package's own wrappers with those shapes
* ``faketorch``, ``faketriton``, ``standins``: what the wrappers run among
* ``record``: which launches the wrappers make
* ``worker``: compiles launches, in the audit's own environment
* ``audit``: trees, cache, limits, verdicts
* ``report``: table, JSON, data of the chart
"""

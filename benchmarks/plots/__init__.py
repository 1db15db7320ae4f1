"""Pictures and tables of README.md and docs/benchmarks, from the committed files: ``python -m benchmarks.plots``.

``pictures_*.py`` draw ``docs/images/*.png``.  ``tables_*.py`` write the tables that stand between the comments
``<!-- table NAME -->`` and ``<!-- end -->`` of a page.  Both read nothing but ``benchmarks/results``, so a figure of a
page is the figure of its file.
"""

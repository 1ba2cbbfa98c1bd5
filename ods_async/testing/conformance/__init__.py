"""One suite for every way in: the same tests through an engine, and through clients near and far.

Each test names the promise it proves (``B22``; ``docs/promises.md`` of the repository lists them). To run it, give a
``conftest.py`` the fixtures and a test module the tests; ``pytest`` is needed::

    from ods_async.testing.conformance.fixtures import *   # conftest.py
    from ods_async.testing.conformance.chunks import *     # test_chunks.py, and so on

To prove a way in of your own, write a fixture ``way_in`` that yields a name that your ``open_way`` understands.
"""

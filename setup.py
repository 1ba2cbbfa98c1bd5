"""The one part that is compiled, where there is a compiler; everything else about the package is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "ods_async.core._copy",
            sources=["ods_async/core/_copy.c"],
            py_limited_api=True,  # one build for every Python from 3.11 on
            extra_compile_args=["-O2", "-Wall", "-Wextra"],
            optional=True,  # without a compiler numpy does the same, see ods_async/core/copying.py
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)

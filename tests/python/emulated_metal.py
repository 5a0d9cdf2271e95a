"""Stands in for mx.fast.metal_kernel where there is no Metal: the text that MLX would compile runs on the host.

MLX writes the whole kernel while it traces a function, which needs no GPU. The text is compiled as C++ with
tests/metal_emulation/msl_host.hpp, and lanes are fibers that run in lockstep (tests/metal_emulation/lanes.hpp).
"""
import ctypes
import functools
import hashlib
import os
import pathlib
import re
import subprocess
import tempfile
import unittest.mock

import mlx.core as mx
import numpy

from kvonce import _metal_policy, _mlx_calls, _mlx_metal

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_real_metal_kernel = mx.fast.metal_kernel


def captured_stdout(function):
    """What `function()` prints, from C++ too."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            function()
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return file.read().decode("utf-8")


def sources_of(function, *arrays):
    """{kernel's name: text} of every kernel that `function(*arrays)` calls with verbose=True."""
    with tempfile.TemporaryDirectory() as folder:
        text = captured_stdout(lambda: mx.export_function(f"{folder}/traced.mlxfn", function, *arrays))
    return dict(re.findall(r"Generated source code for `(\w+)`:\n```\n(.*?)\n```\n", text, re.DOTALL))


def buffers_of(source):
    """Names of the kernel's buffers, in order of their index."""
    found = re.findall(r"(\w+) \[\[buffer\((\d+)\)\]\]", source)
    assert [int(index) for _, index in found] == list(range(len(found))), found
    return [name for name, _ in found]


class Host:
    """Compiles kernels into a folder that lives as long as this object."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        self._kernels = {}

    def compile(self, source):
        if source not in self._kernels:
            kernel = re.search(r"decltype\((.*)\) custom_kernel", source)[1]
            text = source.replace("  threadgroup float shared[", "  static float shared[")
            assert text != source
            code = (f'#include "msl_host.hpp"\n{text}\nextern "C" void run(void** buffers, int x, int y, int z, int simdgroups) '
                    f"{{\n  kvonce::emulation::run_msl(&{kernel}, buffers, {{x, y, z}}, simdgroups);\n}}\n")
            stem = pathlib.Path(self._folder.name) / hashlib.sha256(code.encode()).hexdigest()[:16]
            stem.with_suffix(".cpp").write_text(code, encoding="utf-8")
            emulation = REPOSITORY / "tests" / "metal_emulation"
            lanes = pathlib.Path(self._folder.name) / "lanes.o"
            compiler = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-fPIC", "-w", f"-I{emulation}",
                        f"-I{REPOSITORY / 'src'}"]
            if not lanes.exists():
                subprocess.run([*compiler, "-c", emulation / "lanes.cpp", "-o", lanes], check=True)
            library = stem.with_suffix(".so")
            subprocess.run([*compiler, "-shared", stem.with_suffix(".cpp"), lanes, "-o", library], check=True)
            self._kernels[source] = ctypes.CDLL(str(library)).run
        return self._kernels[source]

    def metal_kernel(self, **definition):
        """mx.fast.metal_kernel."""
        kernel = _real_metal_kernel(**definition)

        def call(*, inputs, template, grid, threadgroup, output_shapes, output_dtypes, stream=None, verbose=False):
            options = dict(template=template, grid=grid, threadgroup=threadgroup, output_shapes=output_shapes,
                           output_dtypes=output_dtypes, verbose=True)
            [source] = sources_of(lambda *arrays: kernel(inputs=list(arrays), **options), *inputs).values()
            assert threadgroup[0] % 32 == 0 and grid[0] % threadgroup[0] == 0 and threadgroup[1:] == (1, 1)
            mx.eval(inputs)
            arrays = dict(zip(definition["input_names"], map(as_numpy, inputs)))
            outputs = [numpy.full(shape, 0xff, dtype=numpy.uint8) for shape in
                       ((int(numpy.prod(shape)) * dtype.size,) for shape, dtype in zip(output_shapes, output_dtypes))]
            kept, pointers = [], []
            for name in buffers_of(source):
                if name in arrays:
                    array = arrays[name]
                    assert array.size >= 8, name  # or MLX would pass it in another address space
                elif name in definition["output_names"]:
                    array = outputs[definition["output_names"].index(name)]
                else:
                    of = arrays[name.removesuffix("_strides")]
                    array = numpy.array([stride // of.itemsize for stride in of.strides], dtype=numpy.int64)
                kept.append(array)
                pointers.append(array.ctypes.data)
            self.compile(source)((ctypes.c_void_p * len(pointers))(*pointers), grid[0] // threadgroup[0], grid[1], grid[2],
                                 threadgroup[0] // 32)
            return [mx.array(output).view(dtype).reshape(shape)
                    for output, shape, dtype in zip(outputs, output_shapes, output_dtypes)]

        return call

    def in_use(self, gpu=_metal_policy.Gpu(family=8), asked=()):
        """A with block in which kvonce.mlx believes that it is on an Apple GPU. asked: as in _mlx_metal.plan_of."""
        return _InUse(self, functools.partial(_mlx_metal.plan_of, gpu=gpu, asked=asked))


class _InUse:
    def __init__(self, host, plan_of):
        self._patches = [unittest.mock.patch.object(mx.fast, "metal_kernel", host.metal_kernel),
                         unittest.mock.patch.object(_mlx_metal, "plan_of", plan_of),
                         unittest.mock.patch.object(_mlx_calls, "backend_of", lambda stream: _mlx_metal)]

    def _forget_kernels(self):
        for kernel in (_mlx_metal.attend_kernel, _mlx_metal.affine_kernel, _mlx_metal.merge_kernel):
            kernel.cache_clear()

    def __enter__(self):
        self._forget_kernels()
        for patch in self._patches:
            patch.start()

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()
        self._forget_kernels()


def as_numpy(array):
    """A view of MLX's memory, strides included; bfloat16 as integers."""
    return numpy.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)

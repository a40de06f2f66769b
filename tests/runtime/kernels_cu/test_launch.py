"""What the driver is told about a function, by a driver that only listens."""

from __future__ import annotations

import pytest

from runtime.kernels_cu import _launch, fill, repack_w4
from runtime.kernels_cu._launch import Function, Launch, LaunchError
from runtime.source import HashWindow


class Listening:
    """cuFuncSetAttribute and cuLaunchKernelEx: every attribute set; a launch of more shared memory than allowed fails."""

    def __init__(self) -> None:
        self.allowed, self.set = 48 << 10, 0

    def cuFuncSetAttribute(self, handle: int, attribute: int, value: int) -> int:
        self.set += 1
        if attribute == _launch._DYNAMIC_SMEM:
            self.allowed = value
        return 0

    def cuLaunchKernelEx(self, config: int, handle: int, arguments: object, extra: object) -> int:
        return 1 if _launch._LaunchConfig.from_address(config).smem_bytes > self.allowed else 0

    def cuGetErrorString(self, status: int, text: object) -> int:
        return 0


@pytest.fixture
def driver(monkeypatch):
    driver = Listening()
    monkeypatch.setattr(_launch, "_driver", lambda: driver)
    return driver


def prepare(function: Function, smem_bytes: int) -> Launch:
    return Launch(function, (1, 1, 1), (32, 1, 1), smem_bytes, ())


def test_a_small_launch_does_not_take_a_large_ones_memory(driver):
    """Two products of one build: the second, prepared later, needs less."""
    function = Function("linear_skinny", 7, None)
    launches = [prepare(function, kib << 10) for kib in (100, 60, 30, 100)]
    for launch in launches:
        launch.run(0)
    assert driver.allowed == 100 << 10 and driver.set == 2


def test_launches_of_readers_keep_pythons_lock(driver, monkeypatch):
    """They go through the library that does not give it away, and no other does."""
    monkeypatch.setattr(_launch, "_held", Listening)
    kinds = repack_w4.call([16], [16], 16, 16, rows=64, k=256), fill.call(HashWindow(1, 0.0, 1.0, "bf16", 8, (0, 2), (0, 8)), 16)
    function = Function("f", 7, None)
    monkeypatch.setattr(_launch, "_driver", lambda: None)
    for call in kinds:
        call.launch({call.entry: function}).run(0)
    with pytest.raises(AttributeError):
        prepare(function, 0).run(0)


def test_mutation_a_function_that_forgets_fails(driver):
    """The same build loaded as two functions of one handle, neither of which knows what the other was allowed."""
    large, _ = prepare(Function("f", 7, None), 100 << 10), prepare(Function("f", 7, None), 60 << 10)
    with pytest.raises(LaunchError, match="launch of f: CUDA error 1"):
        large.run(0)


@pytest.mark.parametrize(
    ("pdl", "cluster", "want"), [(True, 1, [(6, [1, 0, 0])]), (False, 4, [(4, [4, 1, 1])]), (True, 2, [(6, [1, 0, 0]), (4, [2, 1, 1])])]
)
def test_a_launch_has_the_attributes_that_it_needs(driver, pdl, cluster, want):
    launch = Launch(Function("f", 7, None), (8, 1, 1), (32, 1, 1), 0, (), pdl, cluster=cluster)
    config = _launch._LaunchConfig.from_buffer(launch._config)
    given = (_launch._Attribute * config.count).from_address(config.attributes)
    assert [(one.id, list(one.value)[:3]) for one in given] == want and (cluster > 1) == (f"clusters of {cluster}" in str(launch))

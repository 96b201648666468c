from __future__ import annotations

from types import SimpleNamespace

import pytest

from autospec.check import gpu
from autospec.check.gpu import Gpu, GpuWatch, is_local, local_gpus


class FakeError(Exception):
    pass


def fake_nvml(uses: tuple[int, ...], *, has_driver: bool = True) -> SimpleNamespace:
    def init() -> None:
        if not has_driver:
            raise FakeError

    return SimpleNamespace(
        NVMLError=FakeError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(uses),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: f"GPU {handle}",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80e9),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=uses[handle]),
    )


def test_uses_are_averaged_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = GpuWatch()
    monkeypatch.setattr(gpu, "pynvml", fake_nvml((20, 40)))
    watch.read()
    monkeypatch.setattr(gpu, "pynvml", fake_nvml((80, 100)))
    watch.read()
    assert watch.take() == pytest.approx(0.6)
    assert watch.take() is None
    assert local_gpus() == (Gpu("GPU 0", 80e9), Gpu("GPU 1", 80e9))


@pytest.mark.parametrize("there", [None, fake_nvml((), has_driver=False), fake_nvml(())])
def test_without_gpus_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, there: SimpleNamespace | None
) -> None:
    monkeypatch.setattr(gpu, "pynvml", there)
    watch = GpuWatch()
    watch.read()
    assert watch.take() is None
    assert local_gpus() == ()


def test_only_servers_here_have_gpus_here() -> None:
    assert is_local("http://127.0.0.1:8000/v1")
    assert is_local("http://localhost/v1")
    assert is_local("http://[::1]:8000/v1")
    assert not is_local("http://10.0.0.1/v1")
    assert not is_local("https://api.example.com/v1")

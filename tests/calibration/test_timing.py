"""Short kernels are timed without the host's time to issue them."""

import pytest

torch = pytest.importorskip("torch")

from axonn_tune.calibration.measure import timing  # noqa: E402

ISSUE_SECONDS = 6e-6
KERNEL_SECONDS = 2e-6


class SimulatedGpu:
    """A host that issues kernels, and a GPU that runs each as soon as it can."""

    def __init__(self, monkeypatch):
        self.host = self.device = 0.0
        self.n_issued = self.most_issued = 0
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(timing, "synchronize", self.synchronize)
        monkeypatch.setattr(timing, "give_host_a_lead", self.run)

    def run(self, seconds):
        self.device = max(self.device, self.host) + seconds

    def kernel(self):
        self.host += ISSUE_SECONDS
        self.n_issued += 1
        self.run(KERNEL_SECONDS)

    def synchronize(self, device):
        self.host = max(self.host, self.device)
        self.most_issued = max(self.most_issued, self.n_issued)
        self.n_issued = 0


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.seconds = max(self.gpu.device, self.gpu.host)

    def elapsed_time(self, later):
        return 1e3 * (later.seconds - self.seconds)


@pytest.mark.parametrize("sampling", [timing.QUICK, timing.THOROUGH])
def test_short_work_of_one_rank_is_issued_ahead(monkeypatch, sampling):
    gpu = SimulatedGpu(monkeypatch)
    timed = timing.time_work(gpu.kernel, torch.device("cuda"), sampling)
    assert timed.seconds == pytest.approx(KERNEL_SECONDS, rel=1e-3)
    assert gpu.most_issued <= 1000  # more have no room


def test_work_of_several_ranks_takes_as_long_as_it_is_issued(monkeypatch):
    gpu = SimulatedGpu(monkeypatch)
    timed = timing.time_work(gpu.kernel, torch.device("cuda"), timing.QUICK, lambda s: 1.0 * s)
    assert timed.seconds == pytest.approx(ISSUE_SECONDS, rel=0.02)

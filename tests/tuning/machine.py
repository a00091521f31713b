"""A GPU that isn't there: a driver that names one, and tables in a folder of the test's own."""

from types import SimpleNamespace

GPU = "Test GPU (80 GB)"


class Driver:
    """What picking a configuration asks a driver for."""

    def __init__(self, name=GPU, backend="cuda", arch=90):
        self._name, self._target = name, SimpleNamespace(backend=backend, arch=arch)

    def get_current_device(self):
        return 0

    def get_current_target(self):
        return self._target

    def get_device_name(self, device):
        return self._name

"""What several tests need."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def make_mesh(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("fsdp",), axis_types=(AxisType.Auto,))

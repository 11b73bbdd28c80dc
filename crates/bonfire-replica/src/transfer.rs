//! Moves between devices of the whole replica.

use burn_backend::{TensorData, read_sync};

use crate::{Member, ReplicaDevice, ReplicaTensor, read::into_data, value::Kind};

/// The tensor itself if it is on `device`, else a copy made through host memory.
///
/// # Panics
///
/// If the tensor's own group is broken, or its backend cannot read it.
pub(crate) fn to_device<B: Member, K: Kind<B>>(
    tensor: ReplicaTensor<B, K>,
    device: &ReplicaDevice<B>,
    from_data: impl Fn(TensorData, &B::Device) -> K::Primitive,
) -> ReplicaTensor<B, K> {
    if tensor.device_ref() == device {
        return tensor;
    }
    let data = read_sync(into_data(tensor)).unwrap_or_else(|error| panic!("{error}"));
    ReplicaTensor::fresh(from_data(data, device.group.home()), device)
}

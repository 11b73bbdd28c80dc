//! Burn's own data parallelism over a replica: there is nothing left to do for one, and several are refused.

use burn_backend::{
    Device, DeviceId,
    distributed::{
        CollectiveTensor, DistributedBackend, DistributedConfig, DistributedParams, ReduceOperation, TensorRef,
    },
    tensor::FloatTensor,
};

use crate::{Member, Replica, ReplicaDevice};

/// One replica device is one model, whose gradients are those of the whole batch: its members have summed them already.
/// So parameters may be marked as distributed or not, the results are the same, bit for bit.
impl<B: Member> DistributedBackend for Replica<B> {
    /// Nothing, for one device.
    ///
    /// # Panics
    ///
    /// For more than one device.
    fn start_communication_server(devices: &[Self::Device], _config: DistributedConfig) {
        if devices.len() > 1 {
            refuse("train one model on each of", &devices.iter().map(Device::to_id).collect::<Vec<_>>());
        }
    }

    fn close_communication_server(_device: &Self::Device) {}

    fn register_sync_parameters(_device: &Self::Device, _distributed_params: Vec<DistributedParams>) {}

    fn submit_sync_collective(_device: &Self::Device) {}

    fn submit_gradient_sync(_tensor: TensorRef<Self>, _distributed_params: DistributedParams) {}

    /// The tensor itself, of any shape and dtype: the sum, and the mean, over its own device.
    ///
    /// # Panics
    ///
    /// Unless `device_ids` names the tensor's own device, once, and no other.
    fn all_reduce(
        tensor: FloatTensor<Self>,
        _op: ReduceOperation,
        device_ids: Vec<DeviceId>,
    ) -> CollectiveTensor<Self> {
        if device_ids != [tensor.device_ref().to_id()] {
            refuse("all_reduce over", &device_ids);
        }
        CollectiveTensor::new(tensor)
    }

    fn sync_collective(_device: &ReplicaDevice<B>) {}
}

/// # Panics
///
/// Always.
fn refuse(what: &str, devices: &[DeviceId]) -> ! {
    let indices: Vec<u16> = devices.iter().map(|id| id.index_id).collect();
    panic!(
        "a replica does not {what} the replica devices {indices:?}: list all member devices in one `ReplicaDevice::new`, \
         which trains one model on all of them; several processes cannot train one model yet"
    )
}

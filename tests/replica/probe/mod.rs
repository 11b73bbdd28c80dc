//! `Probe`: Flex with its insides in view, for tests of what a replica asks of its members.
//!
//! Every operation is Flex's own and gives Flex's bits. Beside it, a probe's device tells apart members whose results are
//! equal, counts the tensors that are alive, records which operations ran and what they allocated, and is slow or fails
//! when told to. An operation whose inputs are on different devices panics, as it would on accelerators.

mod call;
mod device;
mod ops;
mod tensor;

use std::{
    fmt::Debug,
    thread,
    time::{Duration, Instant},
};

use bonfire::{
    Member, MemberCommunicator,
    collectives::{CollectiveError, ReduceOp},
    value::Value,
};
use burn::{backend::Autodiff, tensor::Tensor};
use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet, ops::TransactionOps};
use burn_flex::{Flex, FlexDevice, FlexQTensor, FlexTensor};

use call::{Call, Open};
pub use device::{Fault, ProbeDevice};
use tensor::Probed;

/// The backend Flex, watched.
#[derive(Clone, Copy, Debug, Default)]
pub struct Probe;

impl BackendTypes for Probe {
    type Device = ProbeDevice;
    type FloatTensorPrimitive = Probed<FlexTensor>;
    type FloatElem = <Flex as BackendTypes>::FloatElem;
    type IntTensorPrimitive = Probed<FlexTensor>;
    type IntElem = <Flex as BackendTypes>::IntElem;
    type BoolTensorPrimitive = Probed<FlexTensor>;
    type BoolElem = <Flex as BackendTypes>::BoolElem;
    type QuantizedTensorPrimitive = Probed<FlexQTensor>;
}

impl Backend for Probe {
    fn name(_device: &Self::Device) -> String {
        "probe".into()
    }

    fn seed(_device: &Self::Device, seed: u64) {
        <Flex as Backend>::seed(&FlexDevice, seed);
    }

    fn dtype_usage(_device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        <Flex as Backend>::dtype_usage(&FlexDevice, dtype)
    }

    fn supports_dtype(_device: &Self::Device, dtype: DType) -> bool {
        <Flex as Backend>::supports_dtype(&FlexDevice, dtype)
    }

    fn device_count(_type_id: u16) -> usize {
        1
    }
}

impl TransactionOps<Self> for Probe {}

/// What Flex does as a member; recorded, and failing, as operations are.
impl Member for Probe {
    const DEVICES_REPEAT: bool = true;

    fn move_to(value: Value<Self>, device: &ProbeDevice) -> Value<Self> {
        let value = match value {
            Value::Float(tensor) => Value::Float(tensor.at(*device)),
            Value::Int(tensor) => Value::Int(tensor.at(*device)),
            Value::Bool(tensor) => Value::Bool(tensor.at(*device)),
            Value::Quantized(tensor) => Value::Quantized(tensor.at(*device)),
        };
        let mut call = Call::new("move_to");
        let value = value.open(&mut call);
        call.run(|| <Flex as Member>::move_to(value, &FlexDevice))
    }

    fn all_reduce(
        values: Vec<Value<Self>>,
        op: ReduceOp,
        communicator: &MemberCommunicator,
    ) -> Result<Vec<Value<Self>>, CollectiveError> {
        let mut call = Call::waiting("all_reduce");
        let values = values.open(&mut call);
        call.run(|| <Flex as Member>::all_reduce(values, op, communicator))
    }
}

/// Waits for members to let go of what was queued.
///
/// # Panics
///
/// If a tensor stays alive.
pub fn assert_nothing_lives(devices: &[ProbeDevice], context: &dyn Debug) {
    // Burn's autodiff keeps what a forward pass without a backward one left behind, on any backend, until somebody's
    // next backward pass.
    Tensor::<Autodiff<Flex>, 1>::ones([2], &FlexDevice).require_grad().sum().backward();
    let deadline = Instant::now() + Duration::from_secs(10);
    let live = || devices.iter().map(|device| device.num_live_tensors()).collect::<Vec<_>>();
    while live().iter().any(|&num| num > 0) {
        assert!(Instant::now() < deadline, "{:?} tensors outlive {context:?}", live());
        thread::sleep(Duration::from_millis(1));
    }
}

//! What a backend does to be a member: move tensors between devices and reduce them over the members.

use bonfire_collectives::{
    BufferMut, CollectiveError, Communicator, Counting, DType as WireType, ReduceOp, ThreadCommunicator,
};
use burn_backend::{Backend, BoolStore, DType, Device, DeviceId, TensorData, read_sync};

use crate::{memory::Buffer, value::Value};

/// The communicator that joins the members of one [`ReplicaDevice`](crate::ReplicaDevice): one rank per member.
pub type MemberCommunicator = Counting<ThreadCommunicator>;

/// A backend whose devices can be members of a [`Replica`](crate::Replica).
///
/// The bodies given here go through host memory and are right for any backend; an `impl Member for MyBackend {}` is
/// enough. Backends override them where they know a shorter way.
pub trait Member: Backend {
    /// Whether one device may serve several members. True of CPUs, whose members are threads.
    const DEVICES_REPEAT: bool = false;

    /// The devices of [`ReplicaDevice::default()`](crate::ReplicaDevice): every visible one.
    fn default_devices() -> Vec<Self::Device> {
        let type_id = Self::Device::default().to_id().type_id;
        (0..Self::device_count(type_id))
            .map(|index| Self::Device::from_id(DeviceId { type_id, index_id: index as u16 }))
            .collect()
    }

    /// Brings a value to `device`; runs on the thread of the member that wants it.
    ///
    /// # Panics
    ///
    /// If the value cannot be read.
    fn move_to(value: Value<Self>, device: &Self::Device) -> Value<Self> {
        if value.device() == *device {
            return value;
        }
        let make = value.maker();
        make(read(value), device)
    }

    /// The memory that holds `value`, so that tensors which share a buffer are counted once.
    fn buffer(value: &Value<Self>) -> Buffer {
        Buffer::own(value.shape().num_elements() * value.dtype().size())
    }

    /// What a member sums along `dim`, in a form that the backend sums rightly.
    fn summable(tensor: Self::FloatTensorPrimitive, _dim: usize) -> Self::FloatTensorPrimitive {
        tensor
    }

    /// Reduces a list of values over the members in one collective; every member gives and gets values of the same
    /// shapes and dtypes. Runs on the thread of each member.
    ///
    /// # Errors
    ///
    /// The communicator's: a member that did not come, or came with something else.
    ///
    /// # Panics
    ///
    /// If a value is quantized, or cannot be read.
    fn all_reduce(
        values: Vec<Value<Self>>,
        op: ReduceOp,
        communicator: &MemberCommunicator,
    ) -> Result<Vec<Value<Self>>, CollectiveError> {
        // A backend whose values lie in host memory gives up its buffers here and gets them back: nothing is copied.
        let kinds: Vec<_> = values.iter().map(|value| (value.maker(), value.device())).collect();
        let mut staged: Vec<TensorData> = values.into_iter().map(read).collect();
        let mut buffers = staged
            .iter_mut()
            .map(|data| BufferMut::new(reduced_type(data.dtype), &mut data.bytes))
            .collect::<Result<Vec<_>, _>>()?;
        communicator.all_reduce_many(&mut buffers, op)?;
        drop(buffers);
        Ok(staged.into_iter().zip(kinds).map(|(data, (make, device))| make(data, &device)).collect())
    }
}

/// One member per core: the devices of a CPU backend are all the same.
fn one_per_core<D: Default + Clone>() -> Vec<D> {
    /// More members than this make the parts of usual batches too small to pay.
    const MAX_CPU_MEMBERS: usize = 8;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    vec![D::default(); cores.min(MAX_CPU_MEMBERS)]
}

mod flex {
    use burn_flex::{Flex, FlexDevice, FlexTensor};

    use super::*;

    impl Member for Flex {
        const DEVICES_REPEAT: bool = true;

        fn default_devices() -> Vec<FlexDevice> {
            one_per_core()
        }

        /// Members share memory. A part that is a view into a larger buffer is copied out of it: it would keep the whole
        /// alive, could not be changed in place, and Flex reduces a strided view of a larger buffer wrongly. So is one
        /// that repeats a smaller buffer: Flex is slow on those, and sums some wrongly.
        fn move_to(value: Value<Self>, _device: &FlexDevice) -> Value<Self> {
            let own = |tensor: FlexTensor| {
                let (shape, strides) = (tensor.layout().shape(), tensor.layout().strides());
                let num_bytes = shape.num_elements() * tensor.dtype().size();
                // Both at once may have as many bytes as the buffer.
                let repeats = shape.iter().zip(strides).any(|(&length, &stride)| length > 1 && stride == 0);
                if repeats || tensor.bytes().len() != num_bytes { tensor.to_contiguous() } else { tensor }
            };
            match value {
                Value::Float(tensor) => Value::Float(own(tensor)),
                Value::Int(tensor) => Value::Int(own(tensor)),
                Value::Bool(tensor) => Value::Bool(own(tensor)),
                Value::Quantized(_) => value,
            }
        }

        fn buffer(value: &Value<Self>) -> Buffer {
            let (tensor, num_scales) = match value {
                Value::Float(tensor) | Value::Int(tensor) | Value::Bool(tensor) => (tensor, 0),
                Value::Quantized(quantized) => (quantized.tensor(), quantized.scales().len()),
            };
            let bytes = tensor.bytes();
            match bytes.len() + num_scales * size_of::<f32>() {
                // Empty buffers have no address of their own.
                0 => Buffer::own(0),
                num_bytes => Buffer::shared(bytes.as_ptr().addr(), num_bytes),
            }
        }

        /// Flex takes the rows of a view for those of its buffer where the dims before `dim` have one row together, as on
        /// a member with one item, where one device has several.
        fn summable(tensor: FlexTensor, dim: usize) -> FlexTensor {
            let num_before: usize = tensor.layout().shape().iter().take(dim).product();
            if num_before == 1 && !tensor.is_contiguous() { tensor.to_contiguous() } else { tensor }
        }
    }
}

#[cfg(feature = "ndarray")]
mod ndarray {
    use burn_ndarray::{
        FloatNdArrayElement, IntNdArrayElement, NdArray, NdArrayDevice, NdArrayTensor, QuantElement, SharedArray,
    };

    use super::*;

    impl<E, I, Q> Member for NdArray<E, I, Q>
    where
        E: FloatNdArrayElement,
        I: IntNdArrayElement,
        Q: QuantElement,
        NdArrayTensor: From<SharedArray<E>>,
        NdArrayTensor: From<SharedArray<I>>,
        Self: Backend<Device = NdArrayDevice>,
    {
        const DEVICES_REPEAT: bool = true;

        fn default_devices() -> Vec<NdArrayDevice> {
            one_per_core()
        }

        fn move_to(value: Value<Self>, _device: &NdArrayDevice) -> Value<Self> {
            value
        }
    }
}

#[cfg(feature = "wgpu")]
mod wgpu {
    use burn_backend::StreamId;
    use burn_wgpu::{BoolElement, CubeBackend, CubeTensor, FloatElement, IntElement, WgpuDevice, WgpuRuntime};

    use super::*;

    impl<F: FloatElement, I: IntElement, T: BoolElement> Member for CubeBackend<WgpuRuntime, F, I, T> {
        /// All GPUs of the best kind there is; else what WGPU takes by default, which may be a CPU.
        fn default_devices() -> Vec<WgpuDevice> {
            let kinds: [fn(usize) -> WgpuDevice; 3] =
                [WgpuDevice::DiscreteGpu, WgpuDevice::IntegratedGpu, WgpuDevice::VirtualGpu];
            kinds
                .into_iter()
                .map(|kind| (0..Self::device_count(kind(0).to_id().type_id)).map(kind).collect::<Vec<_>>())
                .find(|devices| !devices.is_empty())
                .unwrap_or_else(|| vec![WgpuDevice::default()])
        }

        /// Each thread has a stream of its own on a device: a list of work that is submitted later. What a stream has not
        /// submitted yet keeps no buffer alive, so the thread that made a buffer writes over it as soon as its last handle
        /// is gone, in place or with its next tensor. A value of another thread is therefore copied, and the copy
        /// submitted, before its handle is given up.
        fn move_to(value: Value<Self>, device: &WgpuDevice) -> Value<Self> {
            if value.device() == *device {
                match value {
                    Value::Float(tensor) => return Value::Float(own(tensor)),
                    Value::Int(tensor) => return Value::Int(own(tensor)),
                    Value::Bool(tensor) => return Value::Bool(own(tensor)),
                    // Its scales lie in a buffer of their own.
                    Value::Quantized(_) => {}
                }
            }
            let make = value.maker();
            make(read(value), device)
        }
    }

    /// A tensor that this thread's stream has made.
    fn own(tensor: CubeTensor<WgpuRuntime>) -> CubeTensor<WgpuRuntime> {
        if tensor.handle.stream == StreamId::current() {
            return tensor;
        }
        let copy = tensor.copy();
        copy.client.flush().unwrap_or_else(|error| panic!("{error}"));
        copy
    }
}

/// Reads a value on the thread of a member.
///
/// # Panics
///
/// With the inner backend's error, which then becomes the group's first cause.
pub(crate) fn read<B: Backend>(value: Value<B>) -> TensorData {
    read_sync(value.into_data()).unwrap_or_else(|error| panic!("{error}"))
}

/// As [`wire_type`], for what is reduced: the larger and the smaller of two bools are bools, of which only bytes know.
fn reduced_type(dtype: DType) -> WireType {
    match wire_type(dtype) {
        WireType::Bool => WireType::U8,
        other => other,
    }
}

/// The collectives' name of a dtype.
pub(crate) fn wire_type(dtype: DType) -> WireType {
    match dtype {
        DType::F64 => WireType::F64,
        DType::F32 | DType::Flex32 => WireType::F32,
        DType::F16 => WireType::F16,
        DType::BF16 => WireType::BF16,
        DType::I64 => WireType::I64,
        DType::I32 => WireType::I32,
        DType::I16 => WireType::I16,
        DType::I8 => WireType::I8,
        DType::U64 => WireType::U64,
        DType::U32 | DType::Bool(BoolStore::U32) => WireType::U32,
        DType::U16 => WireType::U16,
        DType::U8 | DType::Bool(BoolStore::U8) => WireType::U8,
        DType::Bool(BoolStore::Native) => WireType::Bool,
        DType::QFloat(_) => panic!("quantized tensors are read whole, never reduced over members"),
    }
}

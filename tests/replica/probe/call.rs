//! One operation on its way to Flex and back.

use std::{ops::Range, time::Instant};

use bonfire::value::Value;
use burn_backend::{
    BoolDType, Distribution, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    ops::{
        AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward, DeformConvOptions,
        GridSampleOptions, InterpolateOptions, MaxPool2dBackward, MaxPool2dWithIndices,
    },
    quantization::{QuantScheme, QuantizationParametersPrimitive},
    tensor::IndexingUpdateOp,
};
use burn_flex::{Flex, FlexDevice, FlexQTensor, FlexTensor};

use super::{
    Probe, ProbeDevice,
    device::OpRecord,
    tensor::{Buffered, Probed},
};

pub(super) struct Call {
    name: &'static str,
    /// That of the inputs.
    device: Option<ProbeDevice>,
    /// Addresses of buffers that are no news: those of the inputs, and those of outputs that were counted.
    known: Vec<*const u8>,
    allocated_bytes: usize,
    /// Waits for other devices, which a slow one does at no other pace.
    is_waiting: bool,
}

impl Call {
    pub(super) fn new(name: &'static str) -> Self {
        Self { name, device: None, known: Vec::new(), allocated_bytes: 0, is_waiting: false }
    }

    /// One that waits for other devices.
    pub(super) fn waiting(name: &'static str) -> Self {
        Self { is_waiting: true, ..Self::new(name) }
    }

    /// # Panics
    ///
    /// If a fault was asked for, or as Flex does.
    pub(super) fn run<R: Close>(mut self, body: impl FnOnce() -> R) -> R::Outer {
        self.device().start(self.name);
        let start = Instant::now();
        let outer = body().close(&mut self);
        if !self.is_waiting {
            self.device().delay(start);
        }
        self.device().finish(OpRecord { name: self.name, allocated_bytes: self.allocated_bytes });
        outer
    }

    fn device(&self) -> ProbeDevice {
        self.device.unwrap_or_else(|| panic!("{} has neither a tensor nor a device", self.name))
    }

    fn runs_on(&mut self, device: ProbeDevice) {
        let expected = *self.device.get_or_insert(device);
        assert!(expected == device, "{}: an input is on {device:?}, another on {expected:?}", self.name);
    }

    fn reads(&mut self, buffer: &[u8]) {
        self.known.push(buffer.as_ptr());
    }

    fn writes(&mut self, buffer: &[u8]) {
        if !self.known.contains(&buffer.as_ptr()) {
            self.known.push(buffer.as_ptr());
            self.allocated_bytes += buffer.len();
        }
    }
}

/// An argument as Probe gets it, to be passed on as Flex wants it.
pub(super) trait Open {
    type Inner;
    fn open(self, call: &mut Call) -> Self::Inner;
}

impl<T: Buffered> Open for Probed<T> {
    type Inner = T;

    fn open(self, call: &mut Call) -> T {
        call.runs_on(self.device());
        call.reads(self.buffer());
        self.into_inner()
    }
}

impl Open for &ProbeDevice {
    type Inner = &'static FlexDevice;

    fn open(self, call: &mut Call) -> &'static FlexDevice {
        call.runs_on(*self);
        &FlexDevice
    }
}

impl Open for TensorData {
    type Inner = Self;

    /// Data of the host is on no device yet: Flex takes the buffer over, an accelerator would allocate one.
    fn open(self, _call: &mut Call) -> Self {
        self
    }
}

impl Open for Value<Probe> {
    type Inner = Value<Flex>;

    fn open(self, call: &mut Call) -> Value<Flex> {
        match self {
            Value::Float(tensor) => Value::Float(tensor.open(call)),
            Value::Int(tensor) => Value::Int(tensor.open(call)),
            Value::Bool(tensor) => Value::Bool(tensor.open(call)),
            Value::Quantized(tensor) => Value::Quantized(tensor.open(call)),
        }
    }
}

impl Open for QuantizationParametersPrimitive<Probe> {
    type Inner = QuantizationParametersPrimitive<Flex>;

    fn open(self, call: &mut Call) -> Self::Inner {
        QuantizationParametersPrimitive { scales: self.scales.open(call) }
    }
}

impl<T: Open> Open for Option<T> {
    type Inner = Option<T::Inner>;

    fn open(self, call: &mut Call) -> Self::Inner {
        self.map(|value| value.open(call))
    }
}

impl<T: Open> Open for Vec<T> {
    type Inner = Vec<T::Inner>;

    fn open(self, call: &mut Call) -> Self::Inner {
        self.into_iter().map(|value| value.open(call)).collect()
    }
}

/// What holds no tensor is passed on as it is.
macro_rules! plain {
    ($($type:ty),* $(,)?) => {$(
        impl Open for $type {
            type Inner = Self;

            fn open(self, _call: &mut Call) -> Self {
                self
            }
        }
    )*};
}

plain! {
    bool, usize, f64, [usize; 2], &[usize], &[Slice], Range<i64>, Scalar, Shape, Distribution, FloatDType, IntDType,
    BoolDType, IndexingUpdateOp, &QuantScheme, GridSampleOptions, InterpolateOptions, AttentionModuleOptions,
    ConvOptions<1>, ConvOptions<2>, ConvOptions<3>, ConvTransposeOptions<1>, ConvTransposeOptions<2>,
    ConvTransposeOptions<3>, DeformConvOptions<2>,
}

/// A result as Flex gives it, to be given back as Probe's.
pub(super) trait Close {
    type Outer;
    fn close(self, call: &mut Call) -> Self::Outer;
}

macro_rules! close_tensors {
    ($($tensor:ty),*) => {$(
        impl Close for $tensor {
            type Outer = Probed<Self>;

            fn close(self, call: &mut Call) -> Probed<Self> {
                call.writes(self.buffer());
                Probed::new(self, call.device())
            }
        }
    )*};
}

close_tensors!(FlexTensor, FlexQTensor);

impl Close for TensorData {
    type Outer = Self;

    fn close(self, call: &mut Call) -> Self {
        call.writes(&self.bytes);
        self
    }
}

impl Close for Value<Flex> {
    type Outer = Value<Probe>;

    fn close(self, call: &mut Call) -> Value<Probe> {
        match self {
            Value::Float(tensor) => Value::Float(tensor.close(call)),
            Value::Int(tensor) => Value::Int(tensor.close(call)),
            Value::Bool(tensor) => Value::Bool(tensor.close(call)),
            Value::Quantized(tensor) => Value::Quantized(tensor.close(call)),
        }
    }
}

impl<T: Close> Close for Option<T> {
    type Outer = Option<T::Outer>;

    fn close(self, call: &mut Call) -> Self::Outer {
        self.map(|value| value.close(call))
    }
}

impl<T: Close> Close for Vec<T> {
    type Outer = Vec<T::Outer>;

    fn close(self, call: &mut Call) -> Self::Outer {
        self.into_iter().map(|value| value.close(call)).collect()
    }
}

impl<T: Close, E> Close for Result<T, E> {
    type Outer = Result<T::Outer, E>;

    fn close(self, call: &mut Call) -> Self::Outer {
        self.map(|value| value.close(call))
    }
}

impl<T: Close, U: Close> Close for (T, U) {
    type Outer = (T::Outer, U::Outer);

    fn close(self, call: &mut Call) -> Self::Outer {
        (self.0.close(call), self.1.close(call))
    }
}

macro_rules! close_structs {
    ($($name:ident { $($field:ident),* })*) => {$(
        impl Close for $name<Flex> {
            type Outer = $name<Probe>;

            fn close(self, call: &mut Call) -> $name<Probe> {
                $name { $($field: self.$field.close(call)),* }
            }
        }
    )*};
}

close_structs! {
    MaxPool2dWithIndices { output, indices }
    MaxPool2dBackward { x_grad }
    DeformConv2dBackward { x_grad, offset_grad, weight_grad, mask_grad, bias_grad }
}

use std::fmt;

use burn_backend::{
    DType, QTensorPrimitive, Shape, TensorMetadata,
    quantization::{QuantPropagation, QuantScheme},
};
use burn_flex::{FlexQTensor, FlexTensor};

use super::device::{ProbeDevice, Token};

/// A tensor of Flex that knows which device it is on.
#[derive(Clone)]
pub struct Probed<T> {
    tensor: T,
    device: ProbeDevice,
    /// Counts this handle; the buffer is shared with the handle's clones, as in Flex.
    _token: Token,
}

impl<T> Probed<T> {
    pub(super) fn new(tensor: T, device: ProbeDevice) -> Self {
        Self { tensor, device, _token: Token::new(device) }
    }

    pub(super) fn device(&self) -> ProbeDevice {
        self.device
    }

    /// The same tensor under another device's name: they share memory.
    pub(super) fn at(self, device: ProbeDevice) -> Self {
        Self::new(self.tensor, device)
    }

    /// Flex's own handle, moved so that Flex may compute in place.
    pub(super) fn into_inner(self) -> T {
        self.tensor
    }
}

/// What Flex holds elements in.
pub(super) trait Buffered {
    /// The whole buffer, of which the tensor may be a view.
    fn buffer(&self) -> &[u8];
}

impl Buffered for FlexTensor {
    fn buffer(&self) -> &[u8] {
        self.bytes()
    }
}

impl Buffered for FlexQTensor {
    fn buffer(&self) -> &[u8] {
        self.tensor().bytes()
    }
}

impl<T: Buffered> Buffered for Probed<T> {
    fn buffer(&self) -> &[u8] {
        self.tensor.buffer()
    }
}

impl<T: fmt::Debug> fmt::Debug for Probed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} on {:?}", self.tensor, self.device)
    }
}

impl<T: TensorMetadata> TensorMetadata for Probed<T> {
    fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    fn shape(&self) -> Shape {
        self.tensor.shape()
    }

    fn rank(&self) -> usize {
        self.tensor.rank()
    }
}

impl<T: QTensorPrimitive> QTensorPrimitive for Probed<T> {
    fn scheme(&self) -> &QuantScheme {
        self.tensor.scheme()
    }

    fn propagation(&self) -> QuantPropagation {
        self.tensor.propagation()
    }

    fn default_scheme() -> QuantScheme {
        T::default_scheme()
    }
}

//! What a member holds of a tensor: a primitive of the inner backend, of one of four kinds.

use std::{borrow::Borrow, fmt::Debug};

use bonfire_placement::PartialOp;
use burn_backend::{
    Backend, BackendTypes, DType, ExecutionError, Scalar, Shape, Slice, TensorData, TensorMetadata, read_sync,
};

/// A primitive of the inner backend, its kind known at run time.
#[derive(Clone, Debug)]
pub enum Value<B: Backend> {
    /// A float tensor.
    Float(B::FloatTensorPrimitive),
    /// An integer tensor.
    Int(B::IntTensorPrimitive),
    /// A bool tensor.
    Bool(B::BoolTensorPrimitive),
    /// A quantized float tensor.
    Quantized(B::QuantizedTensorPrimitive),
}

/// Makes a value of one kind that holds one scalar everywhere.
pub(crate) type Full<B> = fn(Shape, Scalar, &<B as BackendTypes>::Device, DType) -> Value<B>;

/// Ties a marker to the primitive of its kind, so that ops on [`ReplicaTensor`](crate::ReplicaTensor) are checked when
/// they are compiled.
pub trait Kind<B: Backend>: Send + Sync + 'static {
    /// The inner backend's tensor of this kind.
    type Primitive: TensorMetadata + 'static;
    /// The same as it lies in a handle; boxed where it is large, so that handles of other kinds are not made larger by it
    /// where Burn puts them side by side.
    type Inline: From<Self::Primitive> + Borrow<Self::Primitive> + Clone + Send + Sync;
    /// Takes it out of the handle.
    fn take(inline: Self::Inline) -> Self::Primitive;
    /// Forgets the kind.
    fn erase(primitive: Self::Primitive) -> Value<B>;
    /// Remembers the kind.
    ///
    /// # Panics
    ///
    /// If the value is of another kind, which no op of this crate produces.
    fn restore(value: Value<B>) -> Self::Primitive;
    /// A tensor of `shape` holding `value` everywhere.
    fn full(shape: Shape, value: Scalar, device: &B::Device, dtype: DType) -> Value<B>;
}

macro_rules! kind {
    ($(#[$doc:meta])* $kind:ident, $primitive:ident, $inline:ty, $take:expr, |$shape:ident, $value:ident, $device:ident, $dtype:ident| $full:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub enum $kind {}

        impl<B: Backend> Kind<B> for $kind {
            type Primitive = B::$primitive;
            type Inline = $inline;

            #[inline(always)]
            fn take(inline: Self::Inline) -> Self::Primitive {
                $take(inline)
            }

            fn erase(primitive: Self::Primitive) -> Value<B> {
                Value::$kind(primitive)
            }

            fn restore(value: Value<B>) -> Self::Primitive {
                match value {
                    Value::$kind(primitive) => primitive,
                    other => panic!("expected a {} tensor, found {other:?}", stringify!($kind)),
                }
            }

            fn full($shape: Shape, $value: Scalar, $device: &B::Device, $dtype: DType) -> Value<B> {
                Value::$kind($full)
            }
        }
    };
}

kind!(
    /// Marks a float tensor.
    Float, FloatTensorPrimitive, B::FloatTensorPrimitive, std::convert::identity,
    |shape, value, device, dtype| {
        // zeros and ones have bodies of their own in most backends; results must not differ from theirs.
        let bits = value.elem::<f64>().to_bits();
        if bits == 0f64.to_bits() {
            B::float_zeros(shape, device, dtype.into())
        } else if bits == 1f64.to_bits() {
            B::float_ones(shape, device, dtype.into())
        } else {
            B::float_full(shape, value, device, dtype.into())
        }
    }
);
kind!(
    /// Marks an integer tensor.
    Int, IntTensorPrimitive, B::IntTensorPrimitive, std::convert::identity,
    |shape, value, device, dtype| {
        match value {
            Scalar::Int(0) | Scalar::UInt(0) => B::int_zeros(shape, device, dtype.into()),
            Scalar::Int(1) | Scalar::UInt(1) => B::int_ones(shape, device, dtype.into()),
            // What changes no minimum; backends fill with numbers that fit an i64.
            Scalar::UInt(large) if i64::try_from(large).is_err() => {
                B::int_from_data(TensorData::full(shape, large).convert_dtype(dtype), device)
            }
            _ => B::int_full(shape, value, device, dtype.into()),
        }
    }
);
kind!(
    /// Marks a bool tensor.
    Bool, BoolTensorPrimitive, B::BoolTensorPrimitive, std::convert::identity,
    |shape, value, device, dtype| {
        if value.elem::<bool>() {
            B::bool_ones(shape, device, dtype.into())
        } else {
            B::bool_zeros(shape, device, dtype.into())
        }
    }
);
kind!(
    /// Marks a quantized tensor.
    Quantized, QuantizedTensorPrimitive, Box<B::QuantizedTensorPrimitive>, |inline: Box<_>| *inline,
    |_shape, _value, _device, dtype| never_filled(dtype)
);

/// # Panics
///
/// Always: no op fills or cuts a quantized tensor, since its scales belong to the whole.
fn never_filled<P>(dtype: DType) -> P {
    panic!("{dtype:?} tensors are never filled nor cut")
}

impl<B: Backend> Value<B> {
    /// Shape of what this member holds.
    pub fn shape(&self) -> Shape {
        match self {
            Value::Float(x) => x.shape(),
            Value::Int(x) => x.shape(),
            Value::Bool(x) => x.shape(),
            Value::Quantized(x) => x.shape(),
        }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Value::Float(x) => x.dtype(),
            Value::Int(x) => x.dtype(),
            Value::Bool(x) => x.dtype(),
            Value::Quantized(x) => x.dtype(),
        }
    }

    /// The device that holds the value.
    pub fn device(&self) -> B::Device {
        match self {
            Value::Float(x) => B::float_device(x),
            Value::Int(x) => B::int_device(x),
            Value::Bool(x) => B::bool_device(x),
            Value::Quantized(x) => B::q_device(x),
        }
    }

    /// Reads the value to the host.
    ///
    /// # Errors
    ///
    /// The inner backend's own error.
    pub async fn into_data(self) -> Result<TensorData, ExecutionError> {
        match self {
            Value::Float(x) => B::float_into_data(x).await,
            Value::Int(x) => B::int_into_data(x).await,
            Value::Bool(x) => B::bool_into_data(x).await,
            Value::Quantized(x) => B::q_into_data(x).await,
        }
    }

    /// Makes values of the kind of `self` from host data.
    pub(crate) fn maker(&self) -> fn(TensorData, &B::Device) -> Self {
        match self {
            Value::Float(_) => |data, device| Value::Float(B::float_from_data(data, device)),
            Value::Int(_) => |data, device| Value::Int(B::int_from_data(data, device)),
            Value::Bool(_) => |data, device| Value::Bool(B::bool_from_data(data, device)),
            Value::Quantized(_) => |data, device| Value::Quantized(B::q_from_data(data, device)),
        }
    }

    /// The same value, a bool tensor under the name `dtype`. Some backends call the result of indexing a bool tensor a
    /// tensor of bytes.
    ///
    /// # Panics
    ///
    /// With the inner backend's error, if the value cannot be read.
    pub(crate) fn with_bool_dtype(self, dtype: DType) -> Self {
        match self {
            Value::Bool(x) if x.dtype() != dtype && x.dtype().size() == dtype.size() => {
                let device = B::bool_device(&x);
                let data = read_sync(B::bool_into_data(x)).unwrap_or_else(|error| panic!("{error}"));
                Value::Bool(B::bool_from_data(TensorData { dtype, ..data }, &device))
            }
            value => value,
        }
    }

    /// A value of the same kind and dtype as `self`, holding `value` everywhere.
    pub(crate) fn same_kind_full(&self, shape: Shape, value: Scalar, device: &B::Device) -> Self {
        let dtype = self.dtype();
        match self {
            Value::Float(_) => Float::full(shape, value, device, dtype),
            Value::Int(_) => Int::full(shape, value, device, dtype),
            Value::Bool(_) => Bool::full(shape, value, device, dtype),
            Value::Quantized(_) => Quantized::full(shape, value, device, dtype),
        }
    }

    /// Rows `range` of dim `dim`.
    pub(crate) fn narrow(self, dim: usize, range: std::ops::Range<usize>) -> Self {
        let shape = self.shape();
        if range == (0..shape[dim]) {
            return self;
        }
        if range.is_empty() {
            let mut empty = shape;
            empty[dim] = 0;
            return self.same_kind_full(empty, Scalar::new(0, &self.dtype()), &self.device());
        }
        let mut slices = vec![Slice::full(); shape.num_dims()];
        slices[dim] = Slice::from(range);
        match self {
            Value::Float(x) => Value::Float(B::float_slice(x, &slices)),
            Value::Int(x) => Value::Int(B::int_slice(x, &slices)),
            Value::Bool(x) => Value::Bool(B::bool_slice(x, &slices)),
            Value::Quantized(x) => Value::Quantized(B::q_slice(x, &slices)),
        }
    }

    /// The value repeated along its dims of length 1, and along new ones on the left, to `shape`.
    pub(crate) fn expanded(self, shape: Shape) -> Self {
        if shape.num_elements() == 0 {
            return self.same_kind_full(shape, Scalar::new(0, &self.dtype()), &self.device());
        }
        match self {
            Value::Float(x) => Value::Float(B::float_expand(x, shape)),
            Value::Int(x) => Value::Int(B::int_expand(x, shape)),
            Value::Bool(x) => Value::Bool(B::bool_expand(x, shape)),
            Value::Quantized(x) => Value::Quantized(B::q_expand(x, shape)),
        }
    }

    /// Joins values of one kind along `dim`, in order. There is at least one.
    pub(crate) fn cat(values: Vec<Self>, dim: usize) -> Self {
        fn restore<B: Backend, K: Kind<B>>(values: Vec<Value<B>>) -> Vec<K::Primitive> {
            values.into_iter().map(K::restore).collect()
        }
        match values.first() {
            Some(_) if values.len() == 1 => values.into_iter().next().expect("one value"),
            Some(Value::Float(_)) => Value::Float(B::float_cat(restore::<B, Float>(values), dim)),
            Some(Value::Int(_)) => Value::Int(B::int_cat(restore::<B, Int>(values), dim)),
            Some(Value::Bool(_)) => Value::Bool(B::bool_cat(restore::<B, Bool>(values), dim)),
            Some(Value::Quantized(_)) => Value::Quantized(B::q_cat(restore::<B, Quantized>(values), dim)),
            None => panic!("nothing to join"),
        }
    }
}

/// What an empty rank contributes to a partial result: the value that changes nothing.
pub(crate) fn identity(op: PartialOp, dtype: DType) -> Scalar {
    match op {
        PartialOp::Sum => Scalar::new(0, &dtype),
        PartialOp::Max => lowest(dtype),
        PartialOp::Min => highest(dtype),
    }
}

fn lowest(dtype: DType) -> Scalar {
    match dtype {
        DType::I64 => Scalar::Int(i64::MIN),
        DType::I32 => Scalar::Int(i32::MIN.into()),
        DType::I16 => Scalar::Int(i16::MIN.into()),
        DType::I8 => Scalar::Int(i8::MIN.into()),
        DType::U64 | DType::U32 | DType::U16 | DType::U8 | DType::Bool(_) => Scalar::new(0, &dtype),
        DType::F64 | DType::F32 | DType::Flex32 | DType::F16 | DType::BF16 | DType::QFloat(_) => {
            Scalar::Float(f64::NEG_INFINITY)
        }
    }
}

fn highest(dtype: DType) -> Scalar {
    match dtype {
        DType::I64 => Scalar::Int(i64::MAX),
        DType::I32 => Scalar::Int(i32::MAX.into()),
        DType::I16 => Scalar::Int(i16::MAX.into()),
        DType::I8 => Scalar::Int(i8::MAX.into()),
        DType::U64 => Scalar::UInt(u64::MAX),
        DType::U32 => Scalar::UInt(u32::MAX.into()),
        DType::U16 => Scalar::UInt(u16::MAX.into()),
        DType::U8 => Scalar::UInt(u8::MAX.into()),
        DType::Bool(_) => Scalar::new(1, &dtype),
        DType::F64 | DType::F32 | DType::Flex32 | DType::F16 | DType::BF16 | DType::QFloat(_) => {
            Scalar::Float(f64::INFINITY)
        }
    }
}

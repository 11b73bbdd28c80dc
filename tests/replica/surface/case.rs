//! A case: one method of a backend trait, the inputs it is called with, and the rule that is expected to share it out.

use std::collections::VecDeque;

use burn::tensor::{
    BoolStore, DType, IntDType, Shape, TensorData,
    backend::{Backend, ExecutionError},
};
use burn_backend::{
    BackendTypes, FloatDType, TensorMetadata, TensorPrimitive, read_sync,
    tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor},
};

/// A tensor of any kind, or something that was read.
#[derive(Clone, Debug)]
pub enum Any<B: Backend> {
    Float(FloatTensor<B>),
    Int(IntTensor<B>),
    Bool(BoolTensor<B>),
    Quantized(QuantizedTensor<B>),
    Data(TensorData),
}

impl<B: Backend> Any<B> {
    pub fn primitive(tensor: TensorPrimitive<B>) -> Self {
        match tensor {
            TensorPrimitive::Float(tensor) => Any::Float(tensor),
            TensorPrimitive::QFloat(tensor) => Any::Quantized(tensor),
        }
    }

    /// Read by the backend.
    pub fn read(data: Result<TensorData, ExecutionError>) -> Self {
        Any::Data(data.unwrap())
    }

    /// An answer that is no tensor.
    pub fn answer(yes: bool) -> Self {
        Any::Data(TensorData::from([yes]))
    }

    /// Of a tensor whose values mean nothing.
    pub fn described(shape: Shape, dtype: DType) -> Self {
        Any::Data(TensorData::from(format!("{shape:?} {dtype:?}").as_bytes()))
    }

    pub fn data(self) -> TensorData {
        match self {
            Any::Float(tensor) => read_sync(B::float_into_data(tensor)).unwrap(),
            Any::Int(tensor) => read_sync(B::int_into_data(tensor)).unwrap(),
            Any::Bool(tensor) => read_sync(B::bool_into_data(tensor)).unwrap(),
            Any::Quantized(tensor) => read_sync(B::q_into_data(tensor)).unwrap(),
            Any::Data(data) => data,
        }
    }

    /// What the caller is told without reading.
    pub fn told(&self) -> (Shape, DType) {
        match self {
            Any::Float(tensor) => (tensor.shape(), tensor.dtype()),
            Any::Int(tensor) => (tensor.shape(), tensor.dtype()),
            Any::Bool(tensor) => (tensor.shape(), tensor.dtype()),
            Any::Quantized(tensor) => (tensor.shape(), tensor.dtype()),
            Any::Data(data) => (data.shape.clone(), data.dtype),
        }
    }
}

/// What a method is called with.
pub struct Args<B: Backend> {
    pub device: <B as BackendTypes>::Device,
    /// Where a tensor can be moved to.
    pub elsewhere: <B as BackendTypes>::Device,
    /// That of the case.
    pub dtype: DType,
    pub inputs: VecDeque<Any<B>>,
}

impl<B: Backend> Args<B> {
    fn next(&mut self) -> Any<B> {
        self.inputs.pop_front().expect("the case lists an input for each that the method takes")
    }

    pub fn float(&mut self) -> FloatTensor<B> {
        match self.next() {
            Any::Float(tensor) => tensor,
            other => panic!("the case lists {other:?} where a float tensor is taken"),
        }
    }

    pub fn int(&mut self) -> IntTensor<B> {
        match self.next() {
            Any::Int(tensor) => tensor,
            other => panic!("the case lists {other:?} where an int tensor is taken"),
        }
    }

    pub fn bool(&mut self) -> BoolTensor<B> {
        match self.next() {
            Any::Bool(tensor) => tensor,
            other => panic!("the case lists {other:?} where a bool tensor is taken"),
        }
    }

    pub fn quantized(&mut self) -> QuantizedTensor<B> {
        match self.next() {
            Any::Quantized(tensor) => tensor,
            other => panic!("the case lists {other:?} where a quantized tensor is taken"),
        }
    }

    pub fn float_dtype(&self) -> FloatDType {
        self.dtype.into()
    }

    pub fn int_dtype(&self) -> IntDType {
        self.dtype.into()
    }
}

/// How a method is shared out, as docs/OPS.md says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    pub name: &'static str,
    pub why: &'static str,
}

/// What the values of an input are, so that the method is defined for them and dtypes hold them exactly.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Values {
    /// Of both signs (where the dtype has them), none is zero.
    Mixed,
    Positive,
    Negative,
    /// Between -0.75 and 0.75.
    Unit,
    /// At least 1.
    AtLeastOne,
    /// -2 to 2, so that products stay small.
    Small,
    /// No two alike.
    Distinct,
    /// 0, 1 and 2.
    Ties,
    /// NaN, infinities and zero among others.
    Special,
    /// 0 to below a number: indices.
    Below(usize),
    /// These.
    Listed(&'static [i64]),
}

/// Which dtype an input has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Of {
    /// The one that the case is run with.
    Case,
    Always(DType),
    /// Made from f32 by the inner backend's own quantization.
    Quantized,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Input {
    pub dtype: Of,
    pub shape: Vec<usize>,
    pub values: Values,
}

impl Input {
    pub fn dtype(&self, of_case: DType) -> DType {
        match self.dtype {
            Of::Case => of_case,
            Of::Always(dtype) => dtype,
            Of::Quantized => DType::F32,
        }
    }
}

/// A tensor of the case's dtype.
pub fn main<const D: usize>(shape: [usize; D], values: Values) -> Input {
    Input { dtype: Of::Case, shape: shape.to_vec(), values }
}

/// Indices below `length`.
pub fn indices<const D: usize>(shape: [usize; D], length: usize) -> Input {
    Input { dtype: Of::Always(DType::I64), shape: shape.to_vec(), values: Values::Below(length) }
}

pub fn mask<const D: usize>(shape: [usize; D]) -> Input {
    Input { dtype: Of::Always(BOOL), shape: shape.to_vec(), values: Values::Mixed }
}

pub fn quantized<const D: usize>(shape: [usize; D], values: Values) -> Input {
    Input { dtype: Of::Quantized, shape: shape.to_vec(), values }
}

pub const BOOL: DType = DType::Bool(BoolStore::Native);
pub const FLOATS: &[DType] = &[DType::F32, DType::F64, DType::F16, DType::BF16];
pub const WIDE: &[DType] = &[DType::F32, DType::F64];
pub const F32: &[DType] = &[DType::F32];
pub const INTS: &[DType] =
    &[DType::I64, DType::I32, DType::I16, DType::I8, DType::U64, DType::U32, DType::U16, DType::U8];
pub const SIGNED: &[DType] = &[DType::I64, DType::I32, DType::I16, DType::I8];
pub const I64: &[DType] = &[DType::I64];
pub const BOOLS: &[DType] = &[BOOL, DType::Bool(BoolStore::U8)];

/// Whether a method has a result at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    Result,
    /// The inner backend draws: tests take turns.
    Drawn,
    /// The inner backend has no such operation, and panics.
    Panic,
    /// Whatever the inner backend does; nothing is asked of members where it panics.
    Any,
}

/// A case without the call.
#[derive(Clone, Debug)]
pub struct Spec {
    pub rule: Rule,
    pub dtypes: &'static [DType],
    /// Inputs, and other inputs that the same call takes.
    pub variants: Vec<Vec<Input>>,
    /// In units of the dtype's epsilon, relative to the largest value; 0: the same values.
    pub tolerance: f64,
    /// What else the call is given.
    pub note: &'static str,
    pub expected: Expected,
}

impl Spec {
    pub fn new<const N: usize>(rule: Rule, dtypes: &'static [DType], inputs: [Input; N]) -> Self {
        Self { rule, dtypes, variants: vec![inputs.into()], tolerance: 0.0, note: "", expected: Expected::Result }
    }

    pub fn or<const N: usize>(mut self, inputs: [Input; N]) -> Self {
        self.variants.push(inputs.into());
        self
    }

    /// Values may differ by so many units of the dtype's epsilon.
    pub fn within(self, tolerance: f64) -> Self {
        Self { tolerance, ..self }
    }

    pub fn note(self, note: &'static str) -> Self {
        Self { note, ..self }
    }

    pub fn expect(self, expected: Expected) -> Self {
        Self { expected, ..self }
    }
}

type Call<B> = Box<dyn Fn(&mut Args<B>) -> Vec<Any<B>>>;

/// One method, and how to call it.
pub struct Case<B: Backend> {
    pub method: &'static str,
    pub spec: Spec,
    pub call: Call<B>,
}

/// Adds a case per named method, all with one signature: `cases! { list, spec, |i| Float (i.float()): exp log }`,
/// where `Float` makes an [`Any`] of the result; a pair, of a pair of results.
macro_rules! cases {
    ($list:ident, $spec:expr, |$i:ident| ($first:ident, $second:ident) $args:tt: $($method:ident)+) => {$(
        $list.push(Case {
            method: stringify!($method),
            spec: $spec,
            call: Box::new(move |$i| {
                let (first, second) = B::$method $args;
                vec![crate::surface::case::Any::$first(first), crate::surface::case::Any::$second(second)]
            }),
        });
    )+};
    ($list:ident, $spec:expr, |$i:ident| $result:ident $args:tt: $($method:ident)+) => {$(
        $list.push(Case {
            method: stringify!($method),
            spec: $spec,
            call: Box::new(move |$i| vec![crate::surface::case::Any::$result(B::$method $args)]),
        });
    )+};
    ($list:ident, $spec:expr, $method:ident: |$i:ident| $results:expr) => {
        $list.push(Case { method: stringify!($method), spec: $spec, call: Box::new(move |$i| $results) });
    };
}

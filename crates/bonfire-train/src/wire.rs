//! Gradients on the host: scaled, and narrowed or widened for their way between ranks.

use core::ops::Range;

use bonfire_collectives::{BufferMut, CollectiveError, DType as WireDType};
use burn::tensor::{DType, Shape, TensorData};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::window::Scale;

/// The dtype in which gradients travel between ranks; sums are formed in f32 and rounded once, whatever it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReduceDType {
    /// At least f32: f64 gradients stay f64, halves are widened.
    #[default]
    F32,
    /// Half the bytes of f32 with its range, but 8 bits of precision.
    BF16,
    /// Half the bytes of f32, 11 bits of precision, nothing above 65504.
    F16,
}

impl ReduceDType {
    /// What gradients of `dtype` travel as.
    pub(crate) fn of(self, dtype: DType) -> DType {
        match self {
            Self::F32 if dtype == DType::F64 => DType::F64,
            Self::F32 => DType::F32,
            Self::BF16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }
}

/// What a float is called on the host: Flex32 is an f32 that a device may compute with in less.
pub(crate) fn host_dtype(dtype: DType) -> DType {
    if dtype == DType::Flex32 { DType::F32 } else { dtype }
}

/// Runs an expression on the values of a gradient, whose type is its dtype's.
macro_rules! with_values {
    ($data:expr, $slice:ident, $values:ident => $run:expr) => {
        match $data.dtype {
            DType::F64 => {
                let $values = $data.$slice::<f64>().expect("bytes of its dtype, aligned by the backend");
                $run
            }
            DType::F16 => {
                let $values = $data.$slice::<f16>().expect("bytes of its dtype, aligned by the backend");
                $run
            }
            DType::BF16 => {
                let $values = $data.$slice::<bf16>().expect("bytes of its dtype, aligned by the backend");
                $run
            }
            _ => {
                let $values = $data.$slice::<f32>().expect("bytes of its dtype, aligned by the backend");
                $run
            }
        }
    };
}

/// Scales a gradient in place.
pub(crate) fn scale(gradient: &mut TensorData, scale: Scale) {
    if scale != Scale::Keep {
        with_values!(gradient, as_mut_slice, values => scale_values(values, scale));
    }
}

/// A gradient's bytes, for a collective.
pub(crate) fn buffer(gradient: &mut TensorData) -> Result<BufferMut<'_>, CollectiveError> {
    let dtype = match gradient.dtype {
        DType::F64 => WireDType::F64,
        DType::F16 => WireDType::F16,
        DType::BF16 => WireDType::BF16,
        _ => WireDType::F32,
    };
    BufferMut::new(dtype, &mut gradient.bytes)
}

/// One buffer for gradients that travel in another dtype than theirs, reused from window to window.
#[derive(Debug)]
pub(crate) enum Flat {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

impl Flat {
    /// Of a dtype that [`ReduceDType::of`] gives for another one.
    pub(crate) fn new(dtype: DType, num_elements: usize) -> Self {
        match dtype {
            DType::F16 => Self::F16(vec![f16::ZERO; num_elements]),
            DType::BF16 => Self::BF16(vec![bf16::ZERO; num_elements]),
            _ => Self::F32(vec![0.0; num_elements]),
        }
    }

    /// Writes a gradient, or zeros where there is none, to `range`.
    pub(crate) fn write(&mut self, range: Range<usize>, gradient: Option<&TensorData>, scale: Scale) {
        match self {
            Self::F32(wire) => write(&mut wire[range], gradient, scale),
            Self::F16(wire) => write(&mut wire[range], gradient, scale),
            Self::BF16(wire) => write(&mut wire[range], gradient, scale),
        }
    }

    /// Reads a gradient from `range`.
    pub(crate) fn read(&self, range: Range<usize>, shape: Shape, dtype: DType, scale: Scale) -> TensorData {
        let mut gradient = TensorData::full_dtype(shape, 0.0, dtype);
        match self {
            Self::F32(wire) => with_values!(gradient, as_mut_slice, values => convert(&wire[range], values, scale)),
            Self::F16(wire) => with_values!(gradient, as_mut_slice, values => convert(&wire[range], values, scale)),
            Self::BF16(wire) => with_values!(gradient, as_mut_slice, values => convert(&wire[range], values, scale)),
        }
        gradient
    }

    /// The whole buffer, for a collective.
    pub(crate) fn buffer(&mut self) -> BufferMut<'_> {
        match self {
            Self::F32(wire) => BufferMut::from_slice(wire),
            Self::F16(wire) => BufferMut::from_slice(wire),
            Self::BF16(wire) => BufferMut::from_slice(wire),
        }
    }
}

fn write<W: Real>(wire: &mut [W], gradient: Option<&TensorData>, scale: Scale) {
    match gradient {
        Some(gradient) => with_values!(gradient, as_slice, values => convert(values, wire, scale)),
        None => wire.fill(W::from_f64(0.0)),
    }
}

fn scale_values<T: Real>(values: &mut [T], scale: Scale) {
    match scale {
        Scale::Keep => {}
        Scale::Divide(divisor) => {
            for value in values {
                *value = T::from_f64(value.to_f64() / divisor);
            }
        }
        Scale::Multiply(factor) => {
            for value in values {
                *value = T::from_f64(value.to_f64() * factor);
            }
        }
    }
}

fn convert<S: Real, D: Real>(from: &[S], to: &mut [D], scale: Scale) {
    let pairs = from.iter().zip(to);
    match scale {
        Scale::Keep => pairs.for_each(|(from, to)| *to = D::from_f64(from.to_f64())),
        Scale::Divide(divisor) => pairs.for_each(|(from, to)| *to = D::from_f64(from.to_f64() / divisor)),
        Scale::Multiply(factor) => pairs.for_each(|(from, to)| *to = D::from_f64(from.to_f64() * factor)),
    }
}

/// A float that is computed with in f64, so that each scaling rounds once.
trait Real: Copy {
    fn to_f64(self) -> f64;
    fn from_f64(value: f64) -> Self;
}

impl Real for f64 {
    fn to_f64(self) -> f64 {
        self
    }

    fn from_f64(value: f64) -> Self {
        value
    }
}

impl Real for f32 {
    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    fn from_f64(value: f64) -> Self {
        value as Self
    }
}

impl Real for f16 {
    fn to_f64(self) -> f64 {
        f64::from(self.to_f32())
    }

    fn from_f64(value: f64) -> Self {
        Self::from_f64(value)
    }
}

impl Real for bf16 {
    fn to_f64(self) -> f64 {
        f64::from(self.to_f32())
    }

    fn from_f64(value: f64) -> Self {
        Self::from_f64(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

    #[test]
    fn gradients_of_every_dtype_travel_in_every_dtype() {
        for dtype in FLOATS {
            for reduce in [ReduceDType::F32, ReduceDType::BF16, ReduceDType::F16] {
                let gradient = TensorData::from([1.0f32, -2.0, 6.0]).convert_dtype(dtype);
                let mut flat = Flat::new(reduce.of(dtype), 5);
                flat.write(1..4, Some(&gradient), Scale::Divide(2.0));
                flat.write(4..5, None, Scale::Keep);
                let read = flat.read(1..5, [4].into(), dtype, Scale::Multiply(4.0));
                assert_eq!(read, TensorData::from([2.0f32, -4.0, 12.0, 0.0]).convert_dtype(dtype));
            }
        }
    }

    #[test]
    fn gradients_are_scaled_in_place_in_their_own_dtype() {
        for dtype in FLOATS {
            let mut gradient = TensorData::from([1.0f32, -2.0, 6.0]).convert_dtype(dtype);
            scale(&mut gradient, Scale::Divide(2.0));
            scale(&mut gradient, Scale::Multiply(4.0));
            scale(&mut gradient, Scale::Keep);
            assert_eq!(gradient, TensorData::from([2.0f32, -4.0, 12.0]).convert_dtype(dtype));
            assert_eq!(buffer(&mut gradient).unwrap().num_elements(), 3);
        }
    }

    #[test]
    fn only_halves_and_what_is_asked_for_leave_their_own_dtype() {
        assert_eq!(FLOATS.map(|dtype| ReduceDType::F32.of(dtype)), [DType::F64, DType::F32, DType::F32, DType::F32]);
        assert_eq!(FLOATS.map(|dtype| ReduceDType::F16.of(dtype)), [DType::F16; 4]);
    }
}

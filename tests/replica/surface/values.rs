//! Values that every dtype of their kind holds exactly, so that a sum split in parts is the value again.

use burn::tensor::{DType, TensorData};

use super::case::Values;

/// Of a tensor of `shape`.
pub fn values(values: Values, dtype: DType, shape: &[usize]) -> TensorData {
    data((0..shape.iter().product()).map(|index| value(values, dtype, index, shape)), dtype, shape)
}

/// What a tensor of one value holds: never zero, where others are allowed.
pub fn constant(values: Values, dtype: DType) -> f64 {
    match (values, dtype) {
        (_, DType::Bool(_)) => 1.0,
        (Values::Below(length), _) => (length - 1) as f64,
        (Values::Ties, _) => 2.0,
        _ => value(values, dtype, 3, &[]),
    }
}

/// `[3, ..shape]`: rows that add up to the values.
pub fn summands(values: Values, dtype: DType, shape: &[usize]) -> TensorData {
    let num = shape.iter().product();
    let half = |value: f64| match value.is_finite() {
        // As many binary digits as the value has.
        true => (value / 2.0 * granules(values, dtype)).trunc() / granules(values, dtype),
        false => 0.0,
    };
    let row = |share: fn(f64, f64) -> f64| {
        (0..num).map(move |index| {
            let value = value(values, dtype, index, shape);
            share(value, half(value))
        })
    };
    let rows = row(|value, half| value - half).chain(row(|_, half| half)).chain(row(|_, _| 0.0));
    data(rows, dtype, &with_rows(3, shape))
}

/// `[3, ..shape]`: rows of which one holds the value and the others less, or more for a positive `step`.
pub fn lower_rows(values: Values, dtype: DType, shape: &[usize], step: f64) -> TensorData {
    let num: usize = shape.iter().product();
    let least = if is_unsigned(dtype) { 0.0 } else { f64::NEG_INFINITY };
    let rows = (0..3).flat_map(|row| {
        (0..num).map(move |index| {
            let value = value(values, dtype, index, shape);
            (value + step * ((row + index) % 3) as f64).max(least)
        })
    });
    data(rows, dtype, &with_rows(3, shape))
}

fn data(values: impl Iterator<Item = f64>, dtype: DType, shape: &[usize]) -> TensorData {
    match dtype {
        DType::Bool(_) => {
            let bits: Vec<bool> = values.map(|value| value != 0.0).collect();
            TensorData::new(bits, shape.to_vec()).convert_dtype(dtype)
        }
        _ => TensorData::new(values.collect::<Vec<f64>>(), shape.to_vec()).convert_dtype(dtype),
    }
}

fn with_rows(num_rows: usize, shape: &[usize]) -> Vec<usize> {
    [&[num_rows], shape].concat()
}

fn is_unsigned(dtype: DType) -> bool {
    matches!(dtype, DType::U64 | DType::U32 | DType::U16 | DType::U8)
}

/// Of 1: what the values are multiples of.
fn granules(values: Values, dtype: DType) -> f64 {
    match values {
        _ if !dtype.is_float() => 1.0,
        Values::Unit => 64.0,
        _ => 16.0,
    }
}

/// The value at a place, which depends on nothing but the place.
fn value(values: Values, dtype: DType, index: usize, shape: &[usize]) -> f64 {
    let mixed = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    // -48 to 48 without 0.
    let number = ((mixed >> 1) % 48 + 1) as f64 * if mixed.is_multiple_of(2) { 1.0 } else { -1.0 };
    let granules = granules(values, dtype);
    let value = match values {
        _ if matches!(dtype, DType::Bool(_)) => return (mixed % 2) as f64,
        Values::Mixed | Values::Unit => number / granules,
        Values::Positive => number.abs() / granules,
        Values::Negative => -number.abs() / granules,
        Values::AtLeastOne => 1.0 + number.abs() / granules,
        Values::Small => [1.0, -2.0, 2.0, -1.0, 1.0][mixed as usize % 5],
        Values::Distinct => {
            let num = shape.iter().product::<usize>().max(1);
            ((index * 37 % num) as f64 - (num / 2) as f64) / granules
        }
        Values::Ties => (mixed % 3) as f64,
        Values::Special => [f64::NAN, 1.0, f64::INFINITY, 0.0, -2.0, f64::NEG_INFINITY, 0.5][mixed as usize % 7],
        Values::Below(length) => (mixed as usize % length) as f64,
        Values::Listed(list) => list[index] as f64,
    };
    match values {
        // No two alike still.
        Values::Distinct if is_unsigned(dtype) => (index * 37 % shape.iter().product::<usize>().max(1)) as f64,
        _ if is_unsigned(dtype) => value.abs(),
        _ => value,
    }
}

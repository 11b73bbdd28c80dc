//! Batches that depend on nothing but the step.

use burn::tensor::{Int, Tensor, TensorData, backend::Backend};

pub use super::super::runs::floats;

/// Integers below `limit`.
pub fn ints<B: Backend, const D: usize>(
    seed: u64,
    shape: [usize; D],
    limit: u64,
    device: &B::Device,
) -> Tensor<B, D, Int> {
    let num: usize = shape.iter().product();
    // A linear congruential generator; its upper bits are good enough.
    let mut state = seed.wrapping_add(1);
    let values: Vec<i64> = (0..num)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % limit) as i64
        })
        .collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

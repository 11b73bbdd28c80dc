//! The arithmetic of a reduction, block by block and in rank order.

use core::ops::Range;

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16, slice::HalfFloatSliceExt};

use crate::{DType, ReduceOp};

/// The bytes of partial results in flight: with one block of input they fit in a 32 KiB level 1 cache.
const BLOCK_BYTES: usize = 8 * 1024;

/// Halves widened at a time; small enough to live in registers and level 1.
const HALVES: usize = 256;

/// One reduction of equal stretches of bytes, one from each rank.
pub(crate) struct Reduction {
    pub(crate) op: ReduceOp,
    pub(crate) dtype: DType,
    pub(crate) world_size: usize,
}

/// Where partial results live, so that a whole list of small buffers needs one piece of stack.
#[repr(C, align(64))]
pub(crate) struct Scratch {
    sums: [u8; BLOCK_BYTES],
    rounded: [u8; BLOCK_BYTES / 2],
}

impl Scratch {
    pub(crate) const fn new() -> Self {
        Self { sums: [0; BLOCK_BYTES], rounded: [0; BLOCK_BYTES / 2] }
    }
}

impl Reduction {
    /// Reduces the bytes of `range`: `read(rank, block)` gives a rank's bytes, `write(block, result)` takes the result.
    ///
    /// The value of an element depends on nothing but the ranks' values of it: not on `range`, nor on its
    /// place in a block.
    ///
    /// # Panics
    ///
    /// If [`ReduceOp::supports`] denies the dtype: callers have checked it.
    pub(crate) fn run<'a>(
        &self,
        scratch: &mut Scratch,
        range: Range<usize>,
        read: impl Fn(usize, Range<usize>) -> &'a [u8],
        write: impl FnMut(Range<usize>, &[u8]),
    ) {
        assert!(self.op.supports(self.dtype), "a reduction that callers have checked");
        match self.dtype {
            DType::F64 => self.run_plain::<f64>(scratch, range, read, write),
            DType::F32 => self.run_plain::<f32>(scratch, range, read, write),
            DType::F16 => self.run_half::<f16>(scratch, range, read, write),
            DType::BF16 => self.run_half::<bf16>(scratch, range, read, write),
            DType::I64 => self.run_plain::<i64>(scratch, range, read, write),
            DType::I32 => self.run_plain::<i32>(scratch, range, read, write),
            DType::I16 => self.run_plain::<i16>(scratch, range, read, write),
            DType::I8 => self.run_plain::<i8>(scratch, range, read, write),
            DType::U64 => self.run_plain::<u64>(scratch, range, read, write),
            DType::U32 => self.run_plain::<u32>(scratch, range, read, write),
            DType::U16 => self.run_plain::<u16>(scratch, range, read, write),
            DType::U8 => self.run_plain::<u8>(scratch, range, read, write),
            DType::Bool => unreachable!("no reduction supports bool"),
        }
    }

    /// For types that accumulate in themselves.
    fn run_plain<'a, T: Number>(
        &self,
        scratch: &mut Scratch,
        range: Range<usize>,
        read: impl Fn(usize, Range<usize>) -> &'a [u8],
        mut write: impl FnMut(Range<usize>, &[u8]),
    ) {
        for block in blocks(range, BLOCK_BYTES) {
            let sums = &mut scratch.sums[..block.len()];
            let inputs = (1..self.world_size).map(|rank| read(rank, block.clone()));
            sums.copy_from_slice(read(0, block.clone()));
            let values: &mut [T] = bytemuck::cast_slice_mut(sums);
            inputs.for_each(|input| fold(self.op, values, bytemuck::cast_slice(input)));
            self.finish(values);
            write(block, sums);
        }
    }

    /// For types that accumulate in f32 and are rounded once, at the end.
    fn run_half<'a, H: Half>(
        &self,
        scratch: &mut Scratch,
        range: Range<usize>,
        read: impl Fn(usize, Range<usize>) -> &'a [u8],
        mut write: impl FnMut(Range<usize>, &[u8]),
    ) {
        for block in blocks(range, BLOCK_BYTES / 2) {
            let sums: &mut [f32] = &mut bytemuck::cast_slice_mut(&mut scratch.sums)[..block.len() / 2];
            widen::<H>(read(0, block.clone()), |at, wide| sums[at].copy_from_slice(wide));
            for rank in 1..self.world_size {
                widen::<H>(read(rank, block.clone()), |at, wide| {
                    fold(self.op, &mut sums[at], bytemuck::cast_slice(wide));
                });
            }
            self.finish(sums);
            let rounded = &mut scratch.rounded[..block.len()];
            H::narrow(sums, bytemuck::cast_slice_mut(rounded));
            write(block, rounded);
        }
    }

    fn finish<T: Number>(&self, sums: &mut [T]) {
        match self.op {
            ReduceOp::Mean => T::divide(sums, self.world_size),
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Min => {}
        }
    }
}

/// Divides sums by the number of ranks, as a mean does last.
#[cfg(feature = "mpi")]
pub(crate) fn divide(dtype: DType, sums: &mut [u8], world_size: usize) {
    fn each<T: Number>(bytes: &mut [u8], world_size: usize) {
        for bytes in bytes.chunks_exact_mut(size_of::<T>()) {
            let mut sum: T = bytemuck::pod_read_unaligned(bytes);
            T::divide(core::slice::from_mut(&mut sum), world_size);
            bytes.copy_from_slice(bytemuck::bytes_of(&sum));
        }
    }
    match dtype {
        DType::F64 => each::<f64>(sums, world_size),
        DType::F32 => each::<f32>(sums, world_size),
        other => unreachable!("{other} is not reduced by a network"),
    }
}

/// Cuts `range` into pieces of at most `num_bytes`.
fn blocks(range: Range<usize>, num_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(num_bytes).map(move |start| start..end.min(start + num_bytes))
}

/// Folds one rank's values into those of the ranks below it.
fn fold<T: Number>(op: ReduceOp, sums: &mut [T], input: &[Unaligned<T>]) {
    fn each<T: Number>(sums: &mut [T], input: &[Unaligned<T>], op: impl Fn(T, T) -> T) {
        for (sum, value) in sums.iter_mut().zip(input) {
            *sum = op(*sum, value.0);
        }
    }
    match op {
        ReduceOp::Sum | ReduceOp::Mean => each(sums, input, T::add),
        ReduceOp::Max => each(sums, input, T::max),
        ReduceOp::Min => each(sums, input, T::min),
    }
}

/// Widens halves of any alignment, a few at a time, and says which they were.
fn widen<H: Half>(bytes: &[u8], mut take: impl FnMut(Range<usize>, &[f32])) {
    let (mut halves, mut wide) = ([H::zeroed(); HALVES], [0.0; HALVES]);
    let mut start = 0;
    for chunk in bytes.chunks(HALVES * size_of::<H>()) {
        let num_values = chunk.len() / size_of::<H>();
        let (halves, wide) = (&mut halves[..num_values], &mut wide[..num_values]);
        bytemuck::cast_slice_mut(halves).copy_from_slice(chunk);
        H::widen(halves, wide);
        take(start..start + num_values, wide);
        start += num_values;
    }
}

/// A value at any address, since bytes of a caller need not be aligned.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Unaligned<T>(T);

// SAFETY: a packed struct of one `Zeroable` field is zero bytes where the field is.
unsafe impl<T: Zeroable> Zeroable for Unaligned<T> {}
// SAFETY: a packed struct of one `Pod` field has no padding and takes every bit pattern.
unsafe impl<T: Pod> Pod for Unaligned<T> {}

/// Arithmetic on a type that accumulates in itself.
trait Number: Pod {
    fn add(self, other: Self) -> Self;
    /// Keeps `self` when equal; the first NaN wins.
    fn max(self, other: Self) -> Self;
    /// Keeps `self` when equal; the first NaN wins.
    fn min(self, other: Self) -> Self;
    /// Divides each sum by the number of ranks.
    fn divide(sums: &mut [Self], world_size: usize);
}

macro_rules! floats {
    ($($float:ty),*) => {$(
        impl Number for $float {
            fn add(self, other: Self) -> Self {
                self + other
            }
            fn max(self, other: Self) -> Self {
                if self >= other || self.is_nan() { self } else { other }
            }
            fn min(self, other: Self) -> Self {
                if self <= other || self.is_nan() { self } else { other }
            }
            fn divide(sums: &mut [Self], world_size: usize) {
                let divisor = world_size as Self;
                if world_size.is_power_of_two() {
                    // The reciprocal is exact, so the product is the quotient, several times faster.
                    let factor = 1.0 / divisor;
                    sums.iter_mut().for_each(|sum| *sum *= factor);
                } else {
                    sums.iter_mut().for_each(|sum| *sum /= divisor);
                }
            }
        }
    )*};
}

macro_rules! integers {
    ($($integer:ty),*) => {$(
        impl Number for $integer {
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            fn max(self, other: Self) -> Self {
                Ord::max(self, other)
            }
            fn min(self, other: Self) -> Self {
                Ord::min(self, other)
            }
            fn divide(_: &mut [Self], _: usize) {
                unreachable!("no mean of integers")
            }
        }
    )*};
}

floats!(f64, f32);
integers!(i64, i32, i16, i8, u64, u32, u16, u8);

/// A 16-bit float that accumulates in f32.
trait Half: Pod {
    fn widen(halves: &[Self], wide: &mut [f32]);
    /// Rounds to nearest, ties to even.
    fn narrow(wide: &[f32], halves: &mut [Self]);
}

macro_rules! halves {
    ($($half:ty),*) => {$(
        impl Half for $half {
            fn widen(halves: &[Self], wide: &mut [f32]) {
                halves.convert_to_f32_slice(wide);
            }
            fn narrow(wide: &[f32], halves: &mut [Self]) {
                halves.convert_from_f32_slice(wide);
            }
        }
    )*};
}

halves!(f16, bf16);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Element;

    fn reduce<T: Element>(op: ReduceOp, ranks: &[&[T]]) -> Vec<T> {
        let mut result = vec![T::zeroed(); ranks[0].len()];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut result);
        Reduction { op, dtype: T::DTYPE, world_size: ranks.len() }.run(
            &mut Scratch::new(),
            0..bytes.len(),
            |rank, block| &bytemuck::cast_slice(ranks[rank])[block],
            |block, values| bytes[block].copy_from_slice(values),
        );
        result
    }

    #[test]
    fn a_mean_of_halves_neither_overflows_nor_vanishes() {
        let half = |value: f32| [f16::from_f32(value)];
        let (large, tiny, middle) = (half(40000.0), half(6e-8), half(2000.0));
        assert_eq!(reduce(ReduceOp::Mean, &[&large, &large]), large);
        assert_eq!(reduce(ReduceOp::Mean, &[&tiny[..]; 8]), [f16::from_bits(1)]);
        assert_eq!(f16::from_bits(1).to_f32(), 5.960_464_5e-8);
        assert_eq!(reduce(ReduceOp::Mean, &[&middle[..]; 64]), middle);
        assert_eq!(reduce(ReduceOp::Sum, &[&large, &large]), [f16::INFINITY]);
    }

    #[test]
    fn a_sum_of_bf16_is_rounded_once() {
        // 256 + 1 + 1 is 258 in f32; rounding after each addition would lose both ones.
        let values = [256.0, 1.0, 1.0].map(|value| [bf16::from_f32(value)]);
        let sum = reduce(ReduceOp::Sum, &[&values[0], &values[1], &values[2]]);
        assert_eq!(sum, [bf16::from_f32(258.0)]);
    }

    #[test]
    fn sums_of_integers_wrap_around() {
        assert_eq!(reduce(ReduceOp::Sum, &[&[i8::MAX, -1], &[1, -2]]), [i8::MIN, -3]);
        assert_eq!(reduce(ReduceOp::Sum, &[&[u64::MAX], &[2]]), [1]);
    }

    #[test]
    fn nan_on_any_rank_makes_max_and_min_nan() {
        for op in [ReduceOp::Max, ReduceOp::Min] {
            let result = reduce(op, &[&[f32::NAN, 1.0, 2.0], &[0.0, f32::NAN, 2.0], &[0.0, 0.0, 2.0]]);
            assert!(result[0].is_nan() && result[1].is_nan());
            assert_eq!(result[2], 2.0);
        }
    }

    #[test]
    fn of_equal_zeros_the_lower_rank_s_is_kept() {
        for op in [ReduceOp::Max, ReduceOp::Min] {
            let result = reduce(op, &[&[0.0f64, -0.0], &[-0.0, 0.0]]);
            assert_eq!(result.map_bits(), [0, 1 << 63]);
        }
    }

    trait MapBits {
        fn map_bits(&self) -> Vec<u64>;
    }

    impl MapBits for Vec<f64> {
        fn map_bits(&self) -> Vec<u64> {
            self.iter().map(|value| value.to_bits()).collect()
        }
    }

    #[test]
    fn a_mean_over_an_odd_number_of_ranks_is_a_true_division() {
        let thirds = reduce(ReduceOp::Mean, &[&[1.0f32], &[0.0], &[0.0]]);
        assert_eq!(thirds, [1.0 / 3.0]);
    }

    #[test]
    fn the_result_does_not_depend_on_where_a_range_is_cut() {
        let a: Vec<f32> = (0..5000).map(|i| (i as f32).sin()).collect();
        let b: Vec<f32> = (0..5000).map(|i| (i as f32).cos() * 1e3).collect();
        let whole = reduce(ReduceOp::Mean, &[&a, &b]);
        for cut in [1, 63, 2048, 4999] {
            let mut parts = reduce(ReduceOp::Mean, &[&a[..cut], &b[..cut]]);
            parts.extend(reduce(ReduceOp::Mean, &[&a[cut..], &b[cut..]]));
            assert!(parts.iter().zip(&whole).all(|(part, whole)| part.to_bits() == whole.to_bits()));
        }
    }
}

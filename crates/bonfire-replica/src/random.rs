//! Draws that depend on seed, draw and position alone: the same numbers wherever, and by however many, they are made.
//!
//! ```text
//! element i of draw d: half i % 2 of Philox4x32-10(key: seed, counter: (i / 2, d)) -> distribution -> dtype
//! ```

use bonfire_placement::Placement;
use burn_backend::{DType, Distribution, Element, Shape, TensorData, bf16, f16};
use rayon::prelude::*;

use crate::{Member, value::Value};

/// Where the draws of a [`ReplicaDevice`](crate::ReplicaDevice) in [`RandomMode::Counter`](crate::RandomMode::Counter)
/// have got to: all that a checkpoint needs to go on with the same numbers.
///
/// ```
/// use bonfire_replica::{RandomMode, Replica, ReplicaDevice, ReplicaOptions};
/// use burn_backend::{Backend, Distribution, FloatDType, Shape, ops::FloatTensorOps};
/// use burn_flex::{Flex, FlexDevice};
///
/// type B = Replica<Flex>;
/// let options = ReplicaOptions { random: RandomMode::Counter, ..Default::default() };
/// let device = ReplicaDevice::<Flex>::with_options([FlexDevice, FlexDevice], options)?;
/// B::seed(&device, 42);
/// B::float_random(Shape::new([3]), Distribution::Default, &device, FloatDType::F32);
/// let saved = device.random_state().expect("draws are counted");
/// assert_eq!((saved.seed, saved.next_draw), (42, 1));
/// device.set_random_state(saved)?;
/// # Ok::<(), bonfire_replica::ReplicaError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RandomState {
    /// Set by Burn's `seed`; 0 before.
    pub seed: u64,
    /// Number of the next tensor to be drawn.
    pub next_draw: u64,
}

impl RandomState {
    /// The draw that comes next.
    pub(crate) fn draw(&mut self, law: Law) -> Draw {
        let number = self.next_draw;
        self.next_draw += 1;
        Draw { seed: self.seed, number, law }
    }
}

/// A drawn tensor, made part by part where it is needed.
#[derive(Clone, Debug)]
pub(crate) struct Draw {
    seed: u64,
    number: u64,
    law: Law,
}

impl Draw {
    pub(crate) fn dtype(&self) -> DType {
        self.law.dtype
    }

    /// All of it.
    pub(crate) fn whole<B: Member>(&self, shape: &Shape, device: &B::Device) -> Value<B> {
        self.value(self.data(shape.clone(), Region::whole(shape)), device)
    }

    /// What `rank` holds in `placement` of a tensor of shape `shape`.
    pub(crate) fn part<B: Member>(
        &self,
        shape: &Shape,
        placement: &Placement,
        rank: usize,
        device: &B::Device,
    ) -> Value<B> {
        let region = match placement {
            Placement::Shard { dim, lengths } => Region::rows(shape, *dim, lengths.range(rank)),
            Placement::Local | Placement::Fill | Placement::Replicate | Placement::Partial { .. } => {
                Region::whole(shape)
            }
        };
        self.value(self.data(Shape::from(placement.local_shape(shape, rank)), region), device)
    }

    fn value<B: Member>(&self, data: TensorData, device: &B::Device) -> Value<B> {
        if int_range(self.law.dtype).is_some() {
            Value::Int(B::int_from_data(data, device))
        } else {
            Value::Float(B::float_from_data(data, device))
        }
    }

    fn data(&self, shape: Shape, region: Region) -> TensorData {
        let law = &self.law;
        match law.dtype {
            DType::F64 => self.fill(shape, region, |pair, half| law.float(pair, half)),
            DType::F32 | DType::Flex32 => self.fill(shape, region, |pair, half| law.float(pair, half) as f32),
            DType::F16 => self.fill(shape, region, |pair, half| f16::from_f64(law.float(pair, half))),
            DType::BF16 => self.fill(shape, region, |pair, half| bf16::from_f64(law.float(pair, half))),
            DType::I64 => self.fill(shape, region, |pair, half| law.int(pair, half) as i64),
            DType::I32 => self.fill(shape, region, |pair, half| law.int(pair, half) as i32),
            DType::I16 => self.fill(shape, region, |pair, half| law.int(pair, half) as i16),
            DType::I8 => self.fill(shape, region, |pair, half| law.int(pair, half) as i8),
            DType::U64 => self.fill(shape, region, |pair, half| law.int(pair, half) as u64),
            DType::U32 => self.fill(shape, region, |pair, half| law.int(pair, half) as u32),
            DType::U16 => self.fill(shape, region, |pair, half| law.int(pair, half) as u16),
            DType::U8 => self.fill(shape, region, |pair, half| law.int(pair, half) as u8),
            DType::Bool(_) | DType::QFloat(_) => never_drawn(law.dtype),
        }
    }

    fn fill<E: Element>(&self, shape: Shape, region: Region, of: impl Fn([u64; 2], usize) -> E + Sync) -> TensorData {
        /// Elements that are worth a thread's while.
        const CHUNK: usize = 1 << 14;
        let fill = |(chunk, values): (usize, &mut [E])| {
            let mut known = (u64::MAX, [0; 2]);
            for (offset, value) in values.iter_mut().enumerate() {
                let index = region.index(chunk * CHUNK + offset);
                let block = index as u64 / 2;
                if known.0 != block {
                    known = (block, self.pair(block));
                }
                *value = of(known.1, index % 2);
            }
        };
        let mut values = vec![E::default(); shape.num_elements()];
        if values.len() > CHUNK {
            values.par_chunks_mut(CHUNK).enumerate().for_each(fill);
        } else {
            fill((0, &mut values));
        }
        TensorData::new(values, shape)
    }

    /// The random bits of elements `2 * block` and `2 * block + 1`.
    fn pair(&self, block: u64) -> [u64; 2] {
        let [b0, b1] = words(block);
        let [d0, d1] = words(self.number);
        let [w0, w1, w2, w3] = philox4x32(words(self.seed), [b0, b1, d0, d1]);
        [u64::from(w1) << 32 | u64::from(w0), u64::from(w3) << 32 | u64::from(w2)]
    }
}

/// Which elements of a row-major tensor a member holds: runs of equal length at equal distances.
#[derive(Clone, Copy, Debug)]
struct Region {
    start: usize,
    run: usize,
    distance: usize,
}

impl Region {
    fn whole(shape: &Shape) -> Self {
        let num_elements = shape.num_elements();
        Self { start: 0, run: num_elements, distance: num_elements }
    }

    fn rows(shape: &Shape, dim: usize, rows: std::ops::Range<usize>) -> Self {
        let row: usize = shape[dim + 1..].iter().product();
        Self { start: rows.start * row, run: rows.len() * row, distance: shape[dim] * row }
    }

    /// Where the element at `local` of the part is in the whole.
    fn index(&self, local: usize) -> usize {
        local / self.run * self.distance + self.start + local % self.run
    }
}

/// A distribution of numbers of one dtype that can be drawn from.
#[derive(Clone, Debug)]
pub(crate) struct Law {
    kind: LawKind,
    dtype: DType,
}

#[derive(Clone, Debug)]
enum LawKind {
    /// `[low, high)`, both of them numbers of the dtype.
    Uniform {
        low: f64,
        high: f64,
    },
    /// `num` integers from `low` on.
    Integers {
        low: i128,
        num: u128,
    },
    Bernoulli(f64),
    Normal {
        mean: f64,
        std: f64,
    },
}

impl Law {
    /// # Panics
    ///
    /// If the distribution has no numbers: an empty range, a probability outside of [0, 1], an infinite deviation.
    pub(crate) fn new(distribution: Distribution, dtype: DType) -> Self {
        // A name for f32 of backends that may compute with less.
        let dtype = if dtype == DType::Flex32 { DType::F32 } else { dtype };
        let kind = match (distribution, int_range(dtype)) {
            (Distribution::Default, None) => LawKind::Uniform { low: 0.0, high: 1.0 },
            (Distribution::Default, Some((lowest, highest))) => {
                LawKind::Integers { low: lowest, num: (highest - lowest) as u128 + 1 }
            }
            (Distribution::Uniform(low, high), None) => {
                let (low, high) = (rounded(low, dtype), rounded(high, dtype));
                let has_numbers = low < high && (high - low).is_finite();
                assert!(has_numbers, "{distribution:?} has no numbers of {dtype:?}");
                LawKind::Uniform { low, high }
            }
            (Distribution::Uniform(low, high), Some((lowest, highest))) => {
                let (low, high) = (low as i128, high as i128);
                let has_numbers = lowest <= low && low < high && high <= highest + 1;
                assert!(has_numbers, "{distribution:?} has no numbers of {dtype:?}, or others than these");
                LawKind::Integers { low, num: (high - low) as u128 }
            }
            (Distribution::Bernoulli(probability), _) => {
                assert!((0.0..=1.0).contains(&probability), "{distribution:?}: a probability is between 0 and 1");
                LawKind::Bernoulli(probability)
            }
            (Distribution::Normal(mean, std), _) => {
                assert!(std.is_finite(), "{distribution:?}: a standard deviation is finite");
                LawKind::Normal { mean, std }
            }
        };
        Self { kind, dtype }
    }

    /// The float that the bits of element `half` of a pair stand for; only normal ones look at both halves.
    fn float(&self, pair: [u64; 2], half: usize) -> f64 {
        match self.kind {
            LawKind::Uniform { low, high } => {
                // Rounding must not lead to `high`.
                let value = (low + (high - low) * unit(pair[half])).min(high.next_down());
                rounded_down(value, self.dtype)
            }
            LawKind::Integers { .. } => self.int(pair, half) as f64,
            LawKind::Bernoulli(probability) => f64::from(u8::from(unit(pair[half]) < probability)),
            // Source: Box and Muller, 1958. The logarithm and the cosine are no system's own: the same everywhere.
            LawKind::Normal { mean, std } => {
                let radius = (-2.0 * libm::log(1.0 - unit(pair[0]))).sqrt();
                let (sin, cos) = libm::sincos(std::f64::consts::TAU * unit(pair[1]));
                mean + std * radius * [cos, sin][half]
            }
        }
    }

    /// As [`float`](Self::float), a number of the integer dtype.
    fn int(&self, pair: [u64; 2], half: usize) -> i128 {
        match self.kind {
            // Some numbers are more probable than others, by less than one part in 2^64 / `num`.
            // Source: Lemire, 2019, section 3, without the rejections, which would make draws depend on each other.
            LawKind::Integers { low, num } => low + ((u128::from(pair[half]) * num) >> 64) as i128,
            LawKind::Uniform { .. } | LawKind::Bernoulli(_) | LawKind::Normal { .. } => {
                let (lowest, highest) = int_range(self.dtype).unwrap_or_else(|| never_drawn(self.dtype));
                (self.float(pair, half) as i128).clamp(lowest, highest)
            }
        }
    }
}

/// Bits as a number in [0, 1).
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// The nearest number of a float dtype.
fn rounded(value: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(value as f32),
        DType::F16 => f16::from_f64(value).to_f64(),
        DType::BF16 => bf16::from_f64(value).to_f64(),
        _ => value,
    }
}

/// The largest number of a float dtype that is not above `value`.
fn rounded_down(value: f64, dtype: DType) -> f64 {
    let (num_bits, smallest_exponent) = match dtype {
        DType::F32 => (24, -126),
        DType::F16 => (11, -14),
        DType::BF16 => (8, -126),
        _ => return value,
    };
    let exponent = ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let step = f64::from_bits(((exponent.max(smallest_exponent) - num_bits + 1 + 1023) as u64) << 52);
    (value / step).floor() * step
}

/// Smallest and largest number of an integer dtype.
fn int_range(dtype: DType) -> Option<(i128, i128)> {
    match dtype {
        DType::I64 => Some((i64::MIN.into(), i64::MAX.into())),
        DType::I32 => Some((i32::MIN.into(), i32::MAX.into())),
        DType::I16 => Some((i16::MIN.into(), i16::MAX.into())),
        DType::I8 => Some((i8::MIN.into(), i8::MAX.into())),
        DType::U64 => Some((0, u64::MAX.into())),
        DType::U32 => Some((0, u32::MAX.into())),
        DType::U16 => Some((0, u16::MAX.into())),
        DType::U8 => Some((0, u8::MAX.into())),
        DType::F64 | DType::F32 | DType::Flex32 | DType::F16 | DType::BF16 => None,
        DType::Bool(_) | DType::QFloat(_) => never_drawn(dtype),
    }
}

/// # Panics
///
/// Always: Burn draws floats and integers.
fn never_drawn(dtype: DType) -> ! {
    panic!("{dtype:?} tensors are never drawn")
}

/// Lower and upper half.
fn words(bits: u64) -> [u32; 2] {
    [bits as u32, (bits >> 32) as u32]
}

/// Philox4x32 with 10 rounds.
///
/// Source: Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (2011), section 3.3.
fn philox4x32(mut key: [u32; 2], mut counter: [u32; 4]) -> [u32; 4] {
    const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
    /// The golden ratio, and the square root of 3 less 1.
    const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
    for _ in 0..10 {
        let [low0, high0] = words(u64::from(MULTIPLIERS[0]) * u64::from(counter[0]));
        let [low1, high1] = words(u64::from(MULTIPLIERS[1]) * u64::from(counter[2]));
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

#[cfg(test)]
mod tests {
    use bonfire_placement::Lengths;

    use super::*;

    /// Source: `kat_vectors` of the authors' library Random123.
    #[test]
    fn philox_gives_the_published_numbers() {
        let published = [
            ([0; 2], [0; 4], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 2], [u32::MAX; 4], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0xa409_3822, 0x299f_31d0],
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (key, counter, expected) in published {
            assert_eq!(philox4x32(key, counter), expected, "key {key:x?}, counter {counter:x?}");
        }
    }

    #[test]
    fn a_part_holds_the_elements_of_its_rows_in_every_dim() {
        let shape = Shape::from([3, 5, 4]);
        let draw = RandomState { seed: 9, next_draw: 3 }.draw(Law::new(Distribution::Default, DType::I32));
        let whole = draw.data(shape.clone(), Region::whole(&shape)).to_vec::<i32>().unwrap();
        for dim in 0..3 {
            let lengths = Lengths::from([1, 0, shape[dim] - 1]);
            for rank in 0..3 {
                let rows = lengths.range(rank);
                let mut local = shape.clone();
                local[dim] = rows.len();
                let part = draw.data(local, Region::rows(&shape, dim, rows.clone())).to_vec::<i32>().unwrap();
                let at = |index: usize| [index / 20, index / 4 % 5, index % 4];
                let expected: Vec<i32> =
                    (0..60).filter(|&index| rows.contains(&at(index)[dim])).map(|index| whole[index]).collect();
                assert_eq!(part, expected, "dim {dim}, rows {rows:?}");
            }
        }
    }

    #[test]
    fn numbers_are_rounded_down_to_numbers_of_the_dtype() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for value in [0.0, 1.0, 0.1, -0.1, 1.0 - 1e-12, -1.0 - 1e-12, 1000.3, 1e-7, -3e-8, 5e-42] {
                let down = rounded_down(value, dtype);
                let nearest = rounded(value, dtype);
                assert_eq!(rounded(down, dtype), down, "{down:e} is no {dtype:?}");
                assert!(down <= value, "{dtype:?}: {down:e} is above {value:e}");
                assert!(
                    down == nearest || nearest > value,
                    "{dtype:?}: {nearest:e} is nearer to {value:e} than {down:e}"
                );
            }
        }
    }

    #[test]
    fn the_largest_bits_stay_below_the_upper_end() {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            for (low, high) in [(0.0, 1.0), (-3.0, -2.0), (1000.0, 1008.0), (-1.0, 0.0), (0.0, 1e-7)] {
                let law = Law::new(Distribution::Uniform(low, high), dtype);
                let (low, high) = (rounded(low, dtype), rounded(high, dtype));
                let (first, last) = (law.float([0; 2], 0), law.float([u64::MAX; 2], 0));
                assert_eq!(first, low);
                assert!(last < high && rounded(last, dtype) == last, "{dtype:?}: {last} of {low}..{high}");
            }
        }
    }

    #[test]
    fn integers_reach_both_ends_of_their_range() {
        for dtype in [DType::I64, DType::I8, DType::U64, DType::U8] {
            let law = Law::new(Distribution::Default, dtype);
            let (lowest, highest) = int_range(dtype).unwrap();
            assert_eq!((law.int([0; 2], 0), law.int([u64::MAX; 2], 0)), (lowest, highest), "{dtype:?}");
        }
        let die = Law::new(Distribution::Uniform(1.0, 7.0), DType::I32);
        assert_eq!((die.int([0; 2], 1), die.int([u64::MAX; 2], 1)), (1, 6));
    }
}

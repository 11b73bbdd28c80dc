//! The sequential reduction that every communicator is compared with, and the values it is fed.

use half::{bf16, f16};

use crate::{DType, ReduceOp};

/// A small generator of pseudo-random numbers, equal on all ranks for equal seeds.
///
/// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A stream of its own for each seed and rank.
    #[must_use]
    pub const fn new(seed: u64, rank: usize) -> Self {
        Self(seed ^ (rank as u64 + 1).wrapping_mul(0xA24B_AED4_963E_E407))
    }

    /// The next 64 bits.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub const fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    /// A float of any sign and of a size where sums depend on their order, now and then NaN, infinite or -0.
    fn float(&mut self) -> f64 {
        match self.below(64) {
            0 => f64::NAN,
            1 => f64::INFINITY,
            2 => -0.0,
            3 => 0.0,
            _ => (self.bits() as i64 as f64) * 2f64.powi(self.below(16) as i32 - 68),
        }
    }
}

/// The bytes that `rank` gives in a case of this seed.
#[must_use]
pub fn values(seed: u64, rank: usize, dtype: DType, num_elements: usize) -> Vec<u8> {
    let mut random = Random::new(seed, rank);
    let mut bytes = Vec::with_capacity(num_elements * dtype.size_bytes());
    for _ in 0..num_elements {
        match dtype {
            DType::F64 => bytes.extend(random.float().to_ne_bytes()),
            DType::F32 => bytes.extend((random.float() as f32).to_ne_bytes()),
            DType::F16 => bytes.extend(f16::from_f64(random.float()).to_ne_bytes()),
            DType::BF16 => bytes.extend(bf16::from_f64(random.float()).to_ne_bytes()),
            DType::Bool => bytes.push(u8::from(random.bits().is_multiple_of(2))),
            DType::I64 | DType::I32 | DType::I16 | DType::I8 | DType::U64 | DType::U32 | DType::U16 | DType::U8 => {
                bytes.extend(&random.bits().to_ne_bytes()[..dtype.size_bytes()])
            }
        }
    }
    bytes
}

/// The reduction of what all ranks gave, element by element and in rank order.
///
/// # Panics
///
/// If the dtype does not support the reduction.
#[must_use]
pub fn reduce(dtype: DType, op: ReduceOp, ranks: &[Vec<u8>]) -> Vec<u8> {
    let size = dtype.size_bytes();
    let num_elements = ranks[0].len() / size;
    let element = |index: usize| ranks.iter().map(move |bytes| &bytes[index * size..(index + 1) * size]);
    macro_rules! float {
        ($float:ty, $wide:ty, $widen:expr, $round:expr) => {
            (0..num_elements)
                .flat_map(|index| {
                    let widen = |bytes: &[u8]| $widen(<$float>::from_ne_bytes(array(bytes)));
                    let values: Vec<$wide> = element(index).map(widen).collect();
                    let sum = || values[1..].iter().fold(values[0], |sum, value| sum + value);
                    let first_nan = values.iter().copied().find(|value| value.is_nan());
                    let better = |is_better: &dyn Fn(&$wide, &$wide) -> bool| {
                        let pick = |best, &value| if is_better(&value, &best) { value } else { best };
                        first_nan.unwrap_or_else(|| values[1..].iter().fold(values[0], pick))
                    };
                    let result: $wide = match op {
                        ReduceOp::Sum => sum(),
                        ReduceOp::Mean => sum() / values.len() as $wide,
                        ReduceOp::Max => better(&|value, best| value > best),
                        ReduceOp::Min => better(&|value, best| value < best),
                    };
                    $round(result).to_ne_bytes()
                })
                .collect()
        };
    }
    macro_rules! integer {
        ($integer:ty) => {
            (0..num_elements)
                .flat_map(|index| {
                    let mut values = element(index).map(|bytes| <$integer>::from_ne_bytes(array(bytes)));
                    let result = match op {
                        ReduceOp::Sum => Some(values.fold(0, <$integer>::wrapping_add)),
                        ReduceOp::Mean => panic!("no mean of integers"),
                        ReduceOp::Max => values.by_ref().max(),
                        ReduceOp::Min => values.by_ref().min(),
                    };
                    result.expect("at least one rank").to_ne_bytes()
                })
                .collect()
        };
    }
    match dtype {
        DType::F64 => float!(f64, f64, |value| value, |value: f64| value),
        DType::F32 => float!(f32, f32, |value| value, |value: f32| value),
        DType::F16 => float!(f16, f32, f16::to_f32, f16::from_f32),
        DType::BF16 => float!(bf16, f32, bf16::to_f32, bf16::from_f32),
        DType::I64 => integer!(i64),
        DType::I32 => integer!(i32),
        DType::I16 => integer!(i16),
        DType::I8 => integer!(i8),
        DType::U64 => integer!(u64),
        DType::U32 => integer!(u32),
        DType::U16 => integer!(u16),
        DType::U8 => integer!(u8),
        DType::Bool => panic!("no reduction of bool"),
    }
}

/// Panics unless both hold the same bits, or both NaN whose payload is the hardware's choice.
///
/// # Panics
///
/// If they differ, saying where.
pub fn assert_same(what: &str, dtype: DType, actual: &[u8], expected: &[u8]) {
    assert_eq!(actual.len(), expected.len(), "{what}: number of bytes");
    let size = dtype.size_bytes();
    for (index, (a, e)) in actual.chunks(size).zip(expected.chunks(size)).enumerate() {
        let both_nan = is_nan(dtype, a) && is_nan(dtype, e);
        assert!(a == e || both_nan, "{what}: element {index} of {dtype} is {a:x?}, must be {e:x?}");
    }
}

fn is_nan(dtype: DType, bytes: &[u8]) -> bool {
    match dtype {
        DType::F64 => f64::from_ne_bytes(array(bytes)).is_nan(),
        DType::F32 => f32::from_ne_bytes(array(bytes)).is_nan(),
        DType::F16 => f16::from_ne_bytes(array(bytes)).is_nan(),
        DType::BF16 => bf16::from_ne_bytes(array(bytes)).is_nan(),
        DType::I64
        | DType::I32
        | DType::I16
        | DType::I8
        | DType::U64
        | DType::U32
        | DType::U16
        | DType::U8
        | DType::Bool => false,
    }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("as many bytes as the dtype has")
}

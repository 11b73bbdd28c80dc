//! Element types that collectives can move and reduce.

use core::fmt;

use half::{bf16, f16};

/// The element type of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// IEEE 754 half precision; sums accumulate in f32.
    F16,
    /// The upper half of an f32; sums accumulate in f32.
    BF16,
    /// 64-bit signed integer.
    I64,
    /// 32-bit signed integer.
    I32,
    /// 16-bit signed integer.
    I16,
    /// 8-bit signed integer.
    I8,
    /// 64-bit unsigned integer.
    U64,
    /// 32-bit unsigned integer.
    U32,
    /// 16-bit unsigned integer.
    U16,
    /// 8-bit unsigned integer.
    U8,
    /// One byte an element; moved as it is, never reduced.
    Bool,
}

impl DType {
    /// Every dtype, for tables and tests.
    pub const ALL: [Self; 13] = [
        Self::F64,
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::I64,
        Self::I32,
        Self::I16,
        Self::I8,
        Self::U64,
        Self::U32,
        Self::U16,
        Self::U8,
        Self::Bool,
    ];

    /// The size of one element in bytes.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    /// Whether elements are floating point numbers.
    #[must_use]
    pub const fn is_float(self) -> bool {
        match self {
            Self::F64 | Self::F32 | Self::F16 | Self::BF16 => true,
            Self::I64
            | Self::I32
            | Self::I16
            | Self::I8
            | Self::U64
            | Self::U32
            | Self::U16
            | Self::U8
            | Self::Bool => false,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::I16 => "i16",
            Self::I8 => "i8",
            Self::U64 => "u64",
            Self::U32 => "u32",
            Self::U16 => "u16",
            Self::U8 => "u8",
            Self::Bool => "bool",
        })
    }
}

/// A Rust type that is an element of a [`DType`], any bit pattern being a valid value.
///
/// `bool` is not one: a buffer of [`DType::Bool`] is made from bytes, since a foreign rank could
/// otherwise write a byte that is neither 0 nor 1 into a `bool`.
pub trait Element: bytemuck::Pod + Send + Sync + private::Sealed {
    /// The dtype of this type.
    const DTYPE: DType;
}

mod private {
    /// Keeps [`Element`](super::Element) to the types of this file.
    pub trait Sealed {}
}

macro_rules! elements {
    ($($element:ty => $dtype:ident),* $(,)?) => {$(
        impl private::Sealed for $element {}
        impl Element for $element {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements! {
    f64 => F64, f32 => F32, f16 => F16, bf16 => BF16,
    i64 => I64, i32 => I32, i16 => I16, i8 => I8,
    u64 => U64, u32 => U32, u16 => U16, u8 => U8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_a_dtype_is_the_size_of_its_element() {
        fn size<T: Element>() -> (usize, usize) {
            (T::DTYPE.size_bytes(), size_of::<T>())
        }
        for (dtype, element) in [
            size::<f64>(),
            size::<f32>(),
            size::<f16>(),
            size::<bf16>(),
            size::<i64>(),
            size::<i32>(),
            size::<i16>(),
            size::<i8>(),
            size::<u64>(),
            size::<u32>(),
            size::<u16>(),
            size::<u8>(),
        ] {
            assert_eq!(dtype, element);
        }
        assert_eq!(DType::Bool.size_bytes(), size_of::<bool>());
    }
}

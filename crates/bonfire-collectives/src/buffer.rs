//! Typed views of host memory.

use core::{fmt, marker::PhantomData, ops::Range, slice};

use crate::{CollectiveError, DType, Element};

/// A buffer that a collective reads: a dtype and borrowed bytes, of any alignment.
#[derive(Clone, Copy)]
pub struct Buffer<'a> {
    region: Region,
    borrow: PhantomData<&'a [u8]>,
}

/// A buffer that a collective writes: a dtype and exclusively borrowed bytes, of any alignment.
pub struct BufferMut<'a> {
    region: Region,
    borrow: PhantomData<&'a mut [u8]>,
}

impl<'a> Buffer<'a> {
    /// No bytes.
    #[cfg(test)]
    pub(crate) const EMPTY: Self = Self::from_whole(DType::U8, &[]);

    /// Views `values`.
    pub fn from_slice<T: Element>(values: &'a [T]) -> Self {
        Self::from_whole(T::DTYPE, bytemuck::cast_slice(values))
    }

    /// Views `bytes` as elements of `dtype`.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::PartialElement`] if the bytes are not a whole number of elements.
    pub fn new(dtype: DType, bytes: &'a [u8]) -> Result<Self, CollectiveError> {
        whole(dtype, bytes.len())?;
        Ok(Self::from_whole(dtype, bytes))
    }

    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.region.dtype
    }

    /// The length in bytes.
    #[must_use]
    pub const fn num_bytes(&self) -> usize {
        self.region.num_bytes
    }

    /// The length in elements.
    #[must_use]
    pub const fn num_elements(&self) -> usize {
        self.region.num_bytes / self.region.dtype.size_bytes()
    }

    /// The bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &'a [u8] {
        // SAFETY: the region was made from a `&'a [u8]` of this length, and `self` keeps that borrow.
        unsafe { slice::from_raw_parts(self.region.start, self.region.num_bytes) }
    }

    pub(crate) const fn region(&self) -> Region {
        self.region
    }

    const fn from_whole(dtype: DType, bytes: &'a [u8]) -> Self {
        // Nothing writes through the pointer of a `Buffer`.
        let region = Region { dtype, start: bytes.as_ptr().cast_mut(), num_bytes: bytes.len() };
        Self { region, borrow: PhantomData }
    }
}

impl<'a> BufferMut<'a> {
    /// Views `values`.
    pub fn from_slice<T: Element>(values: &'a mut [T]) -> Self {
        Self::from_whole(T::DTYPE, bytemuck::cast_slice_mut(values))
    }

    /// Views `bytes` as elements of `dtype`.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::PartialElement`] if the bytes are not a whole number of elements.
    pub fn new(dtype: DType, bytes: &'a mut [u8]) -> Result<Self, CollectiveError> {
        whole(dtype, bytes.len())?;
        Ok(Self::from_whole(dtype, bytes))
    }

    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.region.dtype
    }

    /// The length in bytes.
    #[must_use]
    pub const fn num_bytes(&self) -> usize {
        self.region.num_bytes
    }

    /// The length in elements.
    #[must_use]
    pub const fn num_elements(&self) -> usize {
        self.region.num_bytes / self.region.dtype.size_bytes()
    }

    /// The bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8] {
        // SAFETY: the region was made from a `&'a mut [u8]` of this length, and `self` keeps that borrow.
        unsafe { slice::from_raw_parts(self.region.start, self.region.num_bytes) }
    }

    /// The bytes, to write.
    pub const fn as_bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_bytes`; the `&mut self` makes this the only access.
        unsafe { slice::from_raw_parts_mut(self.region.start, self.region.num_bytes) }
    }

    /// The same buffer for a shorter time, so that it can be used again afterwards.
    pub const fn reborrow(&mut self) -> BufferMut<'_> {
        BufferMut { region: self.region, borrow: PhantomData }
    }

    /// The same buffer, to read.
    #[must_use]
    pub const fn as_buffer(&self) -> Buffer<'_> {
        Buffer { region: self.region, borrow: PhantomData }
    }

    pub(crate) const fn region(&self) -> Region {
        self.region
    }

    const fn from_whole(dtype: DType, bytes: &'a mut [u8]) -> Self {
        let region = Region { dtype, num_bytes: bytes.len(), start: bytes.as_mut_ptr() };
        Self { region, borrow: PhantomData }
    }
}

// SAFETY: a `Buffer` is a `&[u8]` and a dtype, and a `&[u8]` may be sent.
unsafe impl Send for Buffer<'_> {}
// SAFETY: a `Buffer` is a `&[u8]` and a dtype, and a `&[u8]` may be shared.
unsafe impl Sync for Buffer<'_> {}
// SAFETY: a `BufferMut` is a `&mut [u8]` and a dtype, and a `&mut [u8]` may be sent.
unsafe impl Send for BufferMut<'_> {}
// SAFETY: a `&BufferMut` only gives `&[u8]`, which may be shared.
unsafe impl Sync for BufferMut<'_> {}

impl fmt::Debug for Buffer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} x {})", self.num_elements(), self.dtype())
    }
}

impl fmt::Debug for BufferMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferMut({} x {})", self.num_elements(), self.dtype())
    }
}

/// A typed stretch of memory without its borrow, for ranks that read each other's.
#[derive(Clone, Copy)]
pub(crate) struct Region {
    dtype: DType,
    start: *mut u8,
    num_bytes: usize,
}

impl Region {
    /// The bytes of `range`, counted in bytes from the region's start.
    ///
    /// # Safety
    ///
    /// For `'a` the region's borrow is alive and nothing writes these bytes.
    pub(crate) unsafe fn bytes<'a>(self, range: Range<usize>) -> &'a [u8] {
        assert!(range.start <= range.end && range.end <= self.num_bytes, "a range within its buffer");
        // SAFETY: the range lies in the region; the caller keeps its borrow alive and its writers away.
        unsafe { slice::from_raw_parts(self.start.wrapping_add(range.start), range.len()) }
    }

    /// The bytes of `range`, counted in bytes from the region's start, to write.
    ///
    /// # Safety
    ///
    /// The region is a [`BufferMut`]'s; for `'a` its borrow is alive and nothing else touches these bytes.
    pub(crate) unsafe fn bytes_mut<'a>(self, range: Range<usize>) -> &'a mut [u8] {
        assert!(range.start <= range.end && range.end <= self.num_bytes, "a range within its buffer");
        // SAFETY: the range lies in the region; the caller keeps its borrow alive and everyone else away.
        unsafe { slice::from_raw_parts_mut(self.start.wrapping_add(range.start), range.len()) }
    }
}

fn whole(dtype: DType, num_bytes: usize) -> Result<(), CollectiveError> {
    if num_bytes.is_multiple_of(dtype.size_bytes()) {
        Ok(())
    } else {
        Err(CollectiveError::PartialElement { dtype, num_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_end_within_an_element_are_refused() {
        let mut bytes = [0; 12];
        let refused = CollectiveError::PartialElement { dtype: DType::F64, num_bytes: 12 };
        assert_eq!(Buffer::new(DType::F64, &bytes).unwrap_err(), refused);
        assert_eq!(BufferMut::new(DType::F64, &mut bytes).unwrap_err(), refused);
        assert_eq!(BufferMut::new(DType::F32, &mut bytes).map(|b| b.num_elements()), Ok(3));
    }

    #[test]
    fn a_view_shows_and_changes_the_values_it_was_made_from() {
        let mut values = [1u16, 2, 3];
        let mut view = BufferMut::from_slice(&mut values);
        assert_eq!((view.dtype(), view.num_elements(), view.num_bytes()), (DType::U16, 3, 6));
        view.reborrow().as_bytes_mut()[..2].copy_from_slice(&7u16.to_ne_bytes());
        assert_eq!(view.as_buffer().as_bytes(), view.as_bytes());
        assert_eq!(values, [7, 2, 3]);
    }
}

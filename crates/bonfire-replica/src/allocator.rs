//! Keeps the system's allocator from handing memory back that the next step asks for again.

use std::hint::black_box;

/// Has the allocator keep freed memory of up to 64 MiB per thread, if it is glibc's; others are left as they are.
///
/// glibc trims what is free at the end of a thread's heap as soon as that is more than twice the largest block that was
/// mapped on its own and freed. A step frees and asks for tens of MiB in small pieces, on several threads, so it trims
/// many times and then pays for the page faults. A block of nearly 32 MiB, the largest that counts, is mapped and freed
/// here; nobody touches its pages.
///
/// Source: `M_MMAP_THRESHOLD` and `M_TRIM_THRESHOLD` in the manual page mallopt(3).
pub(crate) fn keep_freed_memory() {
    const LARGEST_THAT_COUNTS: usize = 32 << 20;
    const OVERHEAD: usize = 64 << 10;
    let mut block = Vec::<u8>::new();
    // Without room for it there is nothing worth keeping either.
    if block.try_reserve_exact(LARGEST_THAT_COUNTS - OVERHEAD).is_ok() {
        drop(black_box(block));
    }
}

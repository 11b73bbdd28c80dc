//! Buffers that somebody holds, per member: live bytes and their peaks.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{BytesByKind, HomeMemory, MemberMemory, MemoryKind};

/// The memory that holds a tensor of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// `None` if no other tensor shares it.
    address: Option<usize>,
    bytes: usize,
}

impl Buffer {
    /// A tensor's own buffer of `bytes` bytes.
    pub fn own(bytes: usize) -> Self {
        Self { address: None, bytes }
    }

    /// One that tensors may share. While one of them is there, no other buffer of the member has this `address`, which may
    /// be any number that tells buffers apart; `bytes` is the length of the whole buffer, the same for all that share it.
    pub fn shared(address: usize, bytes: usize) -> Self {
        Self { address: Some(address), bytes }
    }
}

/// What all members of a group hold.
pub(crate) struct Memory {
    members: Box<[Mutex<Ledger>]>,
    home: Mutex<Ledger>,
}

impl Memory {
    pub(crate) fn new(num_members: usize) -> Arc<Self> {
        let members = (0..num_members).map(|_| Mutex::default()).collect();
        Arc::new(Self { members, home: Mutex::default() })
    }

    pub(crate) fn num_members(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn hold(&self, rank: usize, buffer: Buffer, kind: MemoryKind) {
        locked(&self.members[rank]).hold(buffer, kind);
    }

    pub(crate) fn release(&self, rank: usize, buffer: Buffer, kind: MemoryKind) {
        locked(&self.members[rank]).release(buffer, kind);
    }

    pub(super) fn release_all(&self, rank: usize, buffers: impl Iterator<Item = (Buffer, MemoryKind)>) {
        let mut ledger = locked(&self.members[rank]);
        buffers.for_each(|(buffer, kind)| ledger.release(buffer, kind));
    }

    /// What was held as `from` is held as `to`.
    pub(crate) fn relabel(&self, rank: usize, buffer: Buffer, from: MemoryKind, to: MemoryKind) {
        let mut ledger = locked(&self.members[rank]);
        ledger.release(buffer, from);
        ledger.hold(buffer, to);
    }

    /// Counts a value at home until the guard's end.
    pub(crate) fn hold_home(self: &Arc<Self>, buffer: Buffer) -> HomeValue {
        locked(&self.home).hold(buffer, MemoryKind::Other);
        HomeValue { memory: self.clone(), buffer }
    }

    pub(super) fn report(&self) -> (Vec<MemberMemory>, HomeMemory) {
        let members = self.members.iter().map(|ledger| locked(ledger).report()).collect();
        let home = locked(&self.home).report();
        (members, HomeMemory { live_bytes: home.live.total(), peak_bytes: home.peak.total() })
    }

    pub(super) fn reset_peaks(&self) {
        self.members.iter().chain([&self.home]).for_each(|ledger| locked(ledger).reset_peaks());
    }
}

/// A value at home is there.
pub(crate) struct HomeValue {
    memory: Arc<Memory>,
    buffer: Buffer,
}

impl Drop for HomeValue {
    fn drop(&mut self) {
        locked(&self.memory.home).release(self.buffer, MemoryKind::Other);
    }
}

/// No ledger is left half written: nothing in here panics.
fn locked(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

type Tally = [u64; MemoryKind::COUNT];

/// Who holds what, on one member.
#[derive(Default)]
struct Ledger {
    live: Tally,
    /// Of `live`.
    total: u64,
    peak: Tally,
    peak_total: u64,
    most: Tally,
    shared: HashMap<usize, Shared, BuildHasherDefault<AddressHasher>>,
}

/// A buffer that several may hold.
struct Shared {
    bytes: usize,
    /// By kind.
    num_holders: [u32; MemoryKind::COUNT],
}

impl Shared {
    /// The kind under which it is counted; `None` if nobody holds it.
    fn kind(&self) -> Option<MemoryKind> {
        MemoryKind::BY_RANK.into_iter().find(|kind| self.num_holders[*kind as usize] > 0)
    }
}

impl Ledger {
    fn hold(&mut self, buffer: Buffer, kind: MemoryKind) {
        let Some(address) = buffer.address else { return self.add(kind, buffer.bytes) };
        let shared =
            self.shared.entry(address).or_insert(Shared { bytes: buffer.bytes, num_holders: Default::default() });
        let before = shared.kind().map(|kind| (kind, shared.bytes));
        if shared.bytes != buffer.bytes {
            // A task has freed the buffer that was here, and its result got the same address.
            *shared = Shared { bytes: buffer.bytes, num_holders: Default::default() };
        }
        shared.num_holders[kind as usize] += 1;
        let after = shared.kind().map(|kind| (kind, shared.bytes));
        if before != after {
            if let Some((kind, bytes)) = before {
                self.subtract(kind, bytes);
            }
            if let Some((kind, bytes)) = after {
                self.add(kind, bytes);
            }
        }
    }

    /// Gives up what [`hold`](Self::hold) was told of; of a buffer that has given way to another one, nothing is left.
    fn release(&mut self, buffer: Buffer, kind: MemoryKind) {
        let Some(address) = buffer.address else { return self.subtract(kind, buffer.bytes) };
        let Some(shared) = self.shared.get_mut(&address).filter(|shared| shared.bytes == buffer.bytes) else { return };
        let Some(before) = shared.kind().filter(|_| shared.num_holders[kind as usize] > 0) else { return };
        shared.num_holders[kind as usize] -= 1;
        match shared.kind() {
            Some(after) if after == before => {}
            Some(after) => {
                self.subtract(before, buffer.bytes);
                self.add(after, buffer.bytes);
            }
            None => {
                self.shared.remove(&address);
                self.subtract(before, buffer.bytes);
            }
        }
    }

    fn add(&mut self, kind: MemoryKind, bytes: usize) {
        let live = &mut self.live[kind as usize];
        *live += bytes as u64;
        self.total += bytes as u64;
        self.most[kind as usize] = self.most[kind as usize].max(*live);
        if self.total > self.peak_total {
            (self.peak, self.peak_total) = (self.live, self.total);
        }
    }

    fn subtract(&mut self, kind: MemoryKind, bytes: usize) {
        self.live[kind as usize] -= bytes as u64;
        self.total -= bytes as u64;
    }

    fn reset_peaks(&mut self) {
        (self.peak, self.peak_total, self.most) = (self.live, self.total, self.live);
    }

    fn report(&self) -> MemberMemory {
        let [live, peak, most] = [self.live, self.peak, self.most].map(BytesByKind::from);
        MemberMemory { live, peak, most }
    }
}

/// Addresses differ above their lowest bits, and the map looks at the highest of the hash and at the lowest.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_usize(usize::from(byte)));
    }

    fn write_usize(&mut self, address: usize) {
        /// 2^64 over the golden ratio, odd. Source: Knuth, The Art of Computer Programming, vol. 3, 6.4.
        const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
        let mixed = (self.0 ^ address as u64).wrapping_mul(FACTOR);
        self.0 = mixed ^ mixed >> 32;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::{
        MemoryKind::{Activations, Gradients, OptimizerState, Other, Parameters},
        *,
    };

    #[test]
    fn a_buffer_is_counted_once_until_its_last_view_goes() {
        let mut ledger = Ledger::default();
        let buffer = Buffer::shared(64, 100);
        ledger.hold(buffer, Activations);
        ledger.hold(buffer, Activations);
        assert_eq!(ledger.report().live.activations, 100);
        ledger.release(buffer, Activations);
        assert_eq!(ledger.report().live.activations, 100);
        ledger.release(buffer, Activations);
        assert_eq!(ledger.report().live.total(), 0);
        assert!(ledger.shared.is_empty());
        assert_eq!(ledger.report().peak.total(), 100);
    }

    #[test]
    fn buffers_of_their_own_are_all_counted() {
        let mut ledger = Ledger::default();
        ledger.hold(Buffer::own(10), Other);
        ledger.hold(Buffer::own(10), Gradients);
        assert_eq!(ledger.report().live, BytesByKind { other: 10, gradients: 10, ..Default::default() });
        ledger.release(Buffer::own(10), Other);
        assert_eq!(ledger.report().live.total(), 10);
    }

    #[test]
    fn a_buffer_of_several_kinds_counts_as_the_most_lasting() {
        let mut ledger = Ledger::default();
        let buffer = Buffer::shared(64, 8);
        let mut kinds = vec![Other];
        ledger.hold(buffer, Other);
        for kind in [Activations, Gradients, OptimizerState, Parameters] {
            ledger.hold(buffer, kind);
            kinds.push(kind);
            assert_eq!(ledger.live[kind as usize], 8);
            assert_eq!(ledger.total, 8);
        }
        while let Some(kind) = kinds.pop() {
            assert_eq!(ledger.live[kind as usize], 8);
            ledger.release(buffer, kind);
        }
        assert_eq!(ledger.total, 0);
    }

    #[test]
    fn a_buffer_that_took_the_address_of_a_freed_one_replaces_it() {
        let mut ledger = Ledger::default();
        let (freed, made) = (Buffer::shared(64, 100), Buffer::shared(64, 40));
        ledger.hold(freed, Activations);
        // The task that took it has freed it, and sets its result before it ends.
        ledger.hold(made, Gradients);
        assert_eq!(ledger.report().live, BytesByKind { gradients: 40, ..Default::default() });
        ledger.release(freed, Activations);
        assert_eq!(ledger.report().live.total(), 40);
        ledger.release(made, Gradients);
        assert_eq!(ledger.report().live.total(), 0);
    }

    #[test]
    fn the_kinds_at_the_peak_are_those_of_one_moment() {
        let mut ledger = Ledger::default();
        ledger.hold(Buffer::own(70), Activations);
        ledger.release(Buffer::own(70), Activations);
        ledger.hold(Buffer::own(40), Gradients);
        ledger.hold(Buffer::own(40), Activations);
        let report = ledger.report();
        assert_eq!(report.peak, BytesByKind { gradients: 40, activations: 40, ..Default::default() });
        assert_eq!(report.most, BytesByKind { gradients: 40, activations: 70, ..Default::default() });
        ledger.release(Buffer::own(40), Activations);
        ledger.reset_peaks();
        assert_eq!(ledger.report().peak, ledger.report().live);
        assert_eq!(ledger.report().most.total(), 40);
    }

    #[test]
    fn a_new_label_moves_the_bytes_and_changes_no_total() {
        let memory = Memory::new(2);
        let buffer = Buffer::shared(64, 8);
        memory.hold(1, buffer, Other);
        memory.relabel(1, buffer, Other, Parameters);
        let (members, _) = memory.report();
        assert_eq!(members[0], MemberMemory::default());
        assert_eq!(members[1].live, BytesByKind { parameters: 8, ..Default::default() });
        assert_eq!(members[1].peak.total(), 8);
    }

    #[test]
    fn a_value_at_home_is_counted_while_its_guard_lives() {
        let memory = Memory::new(1);
        let home = || memory.report().1;
        let value = memory.hold_home(Buffer::own(12));
        assert_eq!(home(), HomeMemory { live_bytes: 12, peak_bytes: 12 });
        drop(value);
        assert_eq!(home(), HomeMemory { live_bytes: 0, peak_bytes: 12 });
    }

    #[test]
    fn addresses_are_spread_over_the_map() {
        let hash = |address: usize| {
            let mut hasher = AddressHasher::default();
            hasher.write_usize(address);
            hasher.finish()
        };
        let low: std::collections::HashSet<u64> = (0..1024).map(|index| hash(index * 64) & 0xfff).collect();
        assert!(low.len() > 600, "{}", low.len());
    }
}

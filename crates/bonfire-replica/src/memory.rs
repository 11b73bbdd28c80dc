//! What the members hold, by kind, told by the tensors themselves.

mod kind;
mod ledger;

use std::{cell::RefCell, fmt, sync::Arc};

use crossbeam_channel::bounded;

use crate::{Member, ReplicaDevice, backend::run_on_all};

pub(crate) use kind::{MemoryKind, Operand, Step, of_sum, of_whole};
pub use ledger::Buffer;
pub(crate) use ledger::{HomeValue, Memory};

/// Bytes of what a tensor is used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct BytesByKind {
    /// Weights and biases, and what a step made of them.
    pub parameters: u64,
    /// Sums over the batch that no statistic is, in parts and formed.
    pub gradients: u64,
    /// What optimizers compute from gradients, and keep.
    pub optimizer_state: u64,
    /// What the members share row by row, and statistics of it: activations and their gradients.
    pub activations: u64,
    /// All else: running statistics, metrics, constants.
    pub other: u64,
}

impl BytesByKind {
    /// The kinds' sum.
    pub fn total(&self) -> u64 {
        self.columns().iter().sum()
    }

    fn columns(&self) -> [u64; MemoryKind::COUNT] {
        [self.parameters, self.gradients, self.optimizer_state, self.activations, self.other]
    }
}

/// Of one member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MemberMemory {
    /// Held now.
    pub live: BytesByKind,
    /// Held when the total was highest.
    pub peak: BytesByKind,
    /// The most of each kind, each at a moment of its own: their sum may be above any total.
    pub most: BytesByKind,
}

/// Of the home device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct HomeMemory {
    /// Held now.
    pub live_bytes: u64,
    /// The most that was held.
    pub peak_bytes: u64,
}

/// What a [`ReplicaDevice`] holds: see [`ReplicaDevice::memory_report`].
///
/// `Display` writes it as a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MemoryReport {
    /// In rank order.
    pub members: Vec<MemberMemory>,
    /// Values that stay on the home device (the first member's) beside their spread forms. In no member's bytes; where
    /// members share memory, as on a CPU, a form that all hold whole may be the very buffer that is counted here.
    pub home: HomeMemory,
    /// Why the group is broken, if it is: then these are the bytes when the report was asked for, some of which may just
    /// be going.
    pub broken: Option<String>,
}

impl MemoryReport {
    /// The largest peak of a member over the smallest: infinity if one held nothing, 1 if none held anything.
    pub fn balance(&self) -> f64 {
        let peaks = || self.members.iter().map(|member| member.peak.total());
        match (peaks().max(), peaks().min()) {
            (Some(largest), Some(smallest)) if largest > 0 => largest as f64 / smallest as f64,
            _ => 1.0,
        }
    }
}

impl<B: Member> ReplicaDevice<B> {
    /// What each member holds of tensors, by kind, now and at its peak since the device was made or
    /// [`reset_peak_memory`](Self::reset_peak_memory) was called. Waits until the members have run all that was enqueued
    /// so far; a broken group is reported as it is, since what a member held when its memory ran out is what one wants
    /// to know.
    ///
    /// Counted are the buffers of spread tensors, each once per member however many views of it there are, until the last
    /// one goes. Not counted are tensors that were never spread and what one operation needs for itself while it runs.
    ///
    /// ```
    /// use bonfire_replica::{Replica, ReplicaDevice};
    /// use burn_backend::{Distribution, FloatDType, Shape, ops::FloatTensorOps};
    /// use burn_flex::{Flex, FlexDevice};
    ///
    /// type B = Replica<Flex>;
    /// let device = ReplicaDevice::new([FlexDevice, FlexDevice])?;
    /// let ones = |rows| B::float_ones(Shape::new([rows, 64]), &device, FloatDType::F32);
    /// let product = B::float_matmul(ones(128), ones(64));
    /// let report = device.memory_report();
    /// // 64 of 128 rows, 64 numbers of 4 bytes each.
    /// assert_eq!(report.members[1].live.activations, 64 * 64 * 4);
    /// println!("{report}");
    /// # drop(product);
    /// # Ok::<(), bonfire_replica::ReplicaError>(())
    /// ```
    pub fn memory_report(&self) -> MemoryReport {
        self.wait_for_members();
        let group = &self.group;
        let (members, home) = group.memory.report();
        MemoryReport { members, home, broken: group.broken().map(ToString::to_string) }
    }

    /// Forgets the peaks: they start again from what is held now. Waits as [`memory_report`](Self::memory_report) does.
    pub fn reset_peak_memory(&self) {
        self.wait_for_members();
        self.group.memory.reset_peaks();
    }

    /// Until all that was enqueued so far has run and given up what it held, or the group is broken.
    fn wait_for_members(&self) {
        let (sender, receiver) = bounded(self.num_members());
        let waiting = run_on_all(self, "memory_report", move |member| {
            // The caller may have given up waiting.
            let _ = sender.send((member.rank, ()));
        });
        // What went wrong is the group's first cause now, and is reported.
        let _ = waiting.and_then(|_| self.group.collect(&receiver, 0..self.num_members()));
    }
}

/// A member's own side of the [`Memory`]: what its running task has taken out of the parts it read.
pub(crate) struct MemberAccount {
    memory: Arc<Memory>,
    rank: usize,
    taken: RefCell<Vec<(Buffer, MemoryKind)>>,
}

impl MemberAccount {
    pub(crate) fn new(memory: Arc<Memory>, rank: usize) -> Self {
        Self { memory, rank, taken: RefCell::default() }
    }

    /// A buffer that the running task may free or write its result to: counted until the task has ended, since an input
    /// and an output that is not made in place are there together.
    pub(crate) fn take(&self, buffer: Buffer, kind: MemoryKind) {
        self.taken.borrow_mut().push((buffer, kind));
    }

    /// The task has ended, well or not.
    pub(crate) fn end_task(&self) {
        let mut taken = self.taken.borrow_mut();
        if !taken.is_empty() {
            self.memory.release_all(self.rank, taken.drain(..));
        }
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; MemoryKind::COUNT] = ["parameters", "gradients", "optimizer state", "activations", "other"];
        let bytes = self.members.iter().map(|member| member.peak.total()).chain([self.home.peak_bytes]);
        let unit = Unit::for_bytes(bytes.max().unwrap_or(0));
        if let Some(cause) = &self.broken {
            writeln!(f, "broken: {cause}")?;
        }
        write!(f, "{:<23}", format!("memory, {}", unit.name))?;
        for name in NAMES {
            write!(f, "  {name:>10}")?;
        }
        writeln!(f, "  {:>10}", "total")?;
        let row = |f: &mut fmt::Formatter<'_>, member: &str, when: &str, bytes: &BytesByKind| {
            write!(f, "{member:<10}{when:<13}")?;
            for (name, bytes) in NAMES.iter().zip(bytes.columns()) {
                write!(f, "  {:>1$}", unit.show(bytes), name.len().max(10))?;
            }
            Ok(())
        };
        for (rank, member) in self.members.iter().enumerate() {
            for (index, (when, bytes)) in [("now", &member.live), ("at peak", &member.peak)].into_iter().enumerate() {
                let name = if index == 0 { format!("member {rank}") } else { String::new() };
                row(f, &name, when, bytes)?;
                writeln!(f, "  {:>10}", unit.show(bytes.total()))?;
            }
            row(f, "", "most of each", &member.most)?;
            writeln!(f)?;
        }
        let HomeMemory { live_bytes, peak_bytes } = self.home;
        writeln!(
            f,
            "kept at home beside spread forms: {} now, {} at peak",
            unit.show(live_bytes),
            unit.show(peak_bytes)
        )?;
        write!(f, "largest peak of a member over the smallest: {:.2}", self.balance())
    }
}

/// In which bytes are shown.
struct Unit {
    name: &'static str,
    bytes: f64,
}

impl Unit {
    fn for_bytes(largest: u64) -> Self {
        if largest < 1 << 20 {
            return Self { name: "KiB", bytes: 1024.0 };
        }
        Self { name: "MiB", bytes: 1024.0 * 1024.0 }
    }

    fn show(&self, bytes: u64) -> String {
        match bytes {
            0 => "0".into(),
            _ => format!("{:.2}", bytes as f64 / self.bytes),
        }
    }
}

/// What `Memory` counts under, in the order of [`BytesByKind`]'s fields.
impl From<[u64; MemoryKind::COUNT]> for BytesByKind {
    fn from([parameters, gradients, optimizer_state, activations, other]: [u64; MemoryKind::COUNT]) -> Self {
        Self { parameters, gradients, optimizer_state, activations, other }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> MemoryReport {
        let kinds = |scale: u64| BytesByKind {
            parameters: 400 * scale,
            gradients: 0,
            optimizer_state: 800 * scale,
            activations: 3 << 20,
            other: 4,
        };
        let member = |scale| MemberMemory { live: kinds(scale), peak: kinds(scale * 2), most: kinds(scale * 3) };
        let home = HomeMemory { live_bytes: 0, peak_bytes: 5 << 20 };
        MemoryReport { members: vec![member(1000), member(1010)], home, broken: None }
    }

    #[test]
    fn a_report_is_a_table_whose_columns_line_up() {
        let text = report().to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 1 + 2 * 3 + 2, "{text}");
        assert!(lines[0].starts_with("memory, MiB"), "{text}");
        for column in ["parameters", "gradients", "optimizer state", "activations", "other"] {
            let end = lines[0].find(column).expect(column) + column.len();
            for line in &lines[1..7] {
                let is_digit = |index: usize| line.as_bytes()[index].is_ascii_digit();
                assert!(is_digit(end - 1) && line.as_bytes().get(end).is_none_or(|byte| *byte == b' '), "{text}");
            }
        }
        assert!(lines[1].ends_with("4.14") && lines[2].ends_with("5.29"), "{text}");
        assert!(text.contains("home beside spread forms: 0 now, 5.00 at peak"), "{text}");
    }

    #[test]
    fn a_report_of_little_is_in_smaller_units_and_one_of_nothing_is_in_balance() {
        let member = MemberMemory { peak: BytesByKind { other: 512, ..Default::default() }, ..Default::default() };
        let text = MemoryReport { members: vec![member], ..Default::default() }.to_string();
        assert!(text.starts_with("memory, KiB") && text.contains("0.50"), "{text}");
        assert!((MemoryReport::default().balance() - 1.0).abs() < f64::EPSILON);
    }

    #[test]
    fn balance_is_the_largest_peak_over_the_smallest() {
        let balance = report().balance();
        let total = |scale: f64| 3.0 * 1024.0 * 1024.0 + 2400.0 * scale + 4.0;
        assert!((balance - total(1010.0) / total(1000.0)).abs() < 1e-12, "{balance}");
    }

    #[test]
    fn a_broken_report_says_so_first() {
        let text = MemoryReport { broken: Some("member 1 failed".into()), ..report() }.to_string();
        assert!(text.starts_with("broken: member 1 failed\nmemory"), "{text}");
    }
}

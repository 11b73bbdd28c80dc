use std::{
    collections::HashMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use burn_backend::{Device, DeviceId, DeviceOps};

/// One of many devices in host memory, told apart by its index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeDevice {
    index: u16,
}

/// One operation that ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpRecord {
    /// The method of the backend.
    pub name: &'static str,
    /// Bytes of its outputs' buffers that are not buffers of its input tensors: views, and results made in place, have
    /// none. (Where Flex frees an input before it allocates the output, the allocator may give the same address again.)
    pub allocated_bytes: usize,
}

/// How an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    OutOfMemory,
    Panic,
}

impl Fault {
    /// What the panic's message says.
    pub fn text(self) -> &'static str {
        match self {
            Fault::OutOfMemory => "out of memory",
            Fault::Panic => "injected",
        }
    }
}

#[derive(Clone, Copy)]
enum Trigger {
    /// After so many operations, once.
    After(usize),
    /// In every call of one method.
    Method(&'static str),
}

/// What is known of a device. Never freed: devices are copied freely, as indices.
#[derive(Default)]
pub(super) struct State {
    num_live: AtomicUsize,
    log: Mutex<Option<Vec<OpRecord>>>,
    fault: Mutex<Option<(Trigger, Fault)>>,
    /// Whether the next tensor that is dropped fails to be.
    drop_fails: AtomicBool,
    /// Bits of an f64: by how much operations take longer than they would, minus 1.
    delay: AtomicU64,
}

impl ProbeDevice {
    /// Devices that no other test uses.
    pub fn fresh(num_devices: usize) -> Vec<Self> {
        static NEXT: AtomicU16 = AtomicU16::new(1);
        (0..num_devices).map(|_| Self { index: NEXT.fetch_add(1, Ordering::Relaxed) }).collect()
    }

    /// Handles of tensors on this device that have not been dropped.
    pub fn num_live_tensors(self) -> usize {
        self.state().num_live.load(Ordering::SeqCst)
    }

    /// Records operations from now on, until [`Recording::take`] or the guard's end.
    pub fn record(self) -> Recording {
        let before = locked(&self.state().log).replace(Vec::new());
        assert!(before.is_none(), "{self:?} is recorded already");
        Recording { device: self }
    }

    /// Lets operation `index` from now on fail; the next one is operation 0.
    pub fn fail_at(self, index: usize, fault: Fault) {
        *locked(&self.state().fault) = Some((Trigger::After(index), fault));
    }

    /// Lets every call of a method fail.
    pub fn fail_in(self, name: &'static str, fault: Fault) {
        *locked(&self.state().fault) = Some((Trigger::Method(name), fault));
    }

    /// Lets one tensor panic when it is dropped, the next one that is dropped while nothing else panics.
    pub fn fail_in_drop(self) {
        self.state().drop_fails.store(true, Ordering::SeqCst);
    }

    /// Nothing fails any more.
    pub fn heal(self) {
        self.state().drop_fails.store(false, Ordering::SeqCst);
        *locked(&self.state().fault) = None;
    }

    /// Every operation takes `factor` times its time from now on, the rest of it busy waiting; 1 is Flex's own pace.
    pub fn slow_down(self, factor: f64) {
        self.state().delay.store((factor - 1.0).to_bits(), Ordering::Relaxed);
    }

    /// Waits for as long as an operation that began at `start` is to take longer.
    pub(super) fn delay(self, start: Instant) {
        let delay = f64::from_bits(self.state().delay.load(Ordering::Relaxed));
        if delay > 0.0 {
            let end = Instant::now() + Duration::from_secs_f64(start.elapsed().as_secs_f64() * delay);
            while Instant::now() < end {
                std::hint::spin_loop();
            }
        }
    }

    /// # Panics
    ///
    /// If a fault was asked for here.
    pub(super) fn start(self, name: &'static str) {
        let due = {
            let mut fault = locked(&self.state().fault);
            match &mut *fault {
                Some((Trigger::After(0), _)) => fault.take(),
                Some((Trigger::After(left), _)) => {
                    *left -= 1;
                    None
                }
                Some((Trigger::Method(method), _)) if *method == name => *fault,
                Some((Trigger::Method(_), _)) | None => None,
            }
        };
        if let Some((_, fault)) = due {
            panic!("{name} on {self:?}: {}", fault.text());
        }
    }

    pub(super) fn finish(self, record: OpRecord) {
        if let Some(log) = &mut *locked(&self.state().log) {
            log.push(record);
        }
    }

    fn state(self) -> &'static State {
        static STATES: Mutex<Option<HashMap<u16, &'static State>>> = Mutex::new(None);
        locked(&STATES).get_or_insert_default().entry(self.index).or_insert_with(|| Box::leak(Box::default()))
    }
}

impl Device for ProbeDevice {
    fn from_id(id: DeviceId) -> Self {
        Self { index: id.index_id }
    }

    fn to_id(&self) -> DeviceId {
        /// Far from those of Burn's own devices.
        const TYPE_ID: u16 = 0xb0f1;
        DeviceId { type_id: TYPE_ID, index_id: self.index }
    }
}

impl DeviceOps for ProbeDevice {}

/// Operations on a device are recorded while this lives.
pub struct Recording {
    device: ProbeDevice,
}

impl Recording {
    /// What ran since the recording began, in order.
    pub fn take(self) -> Vec<OpRecord> {
        locked(&self.device.state().log).take().expect("recorded since `record`")
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        *locked(&self.device.state().log) = None;
    }
}

/// Counts one handle of a tensor as alive.
pub(super) struct Token(&'static State);

impl Token {
    pub(super) fn new(device: ProbeDevice) -> Self {
        let state = device.state();
        state.num_live.fetch_add(1, Ordering::SeqCst);
        Self(state)
    }
}

impl Clone for Token {
    fn clone(&self) -> Self {
        self.0.num_live.fetch_add(1, Ordering::SeqCst);
        Self(self.0)
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        self.0.num_live.fetch_sub(1, Ordering::SeqCst);
        if !thread::panicking() && self.0.drop_fails.swap(false, Ordering::SeqCst) {
            panic!("a tensor cannot be freed: {}", Fault::Panic.text());
        }
    }
}

/// A failing operation leaves nothing half done here.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

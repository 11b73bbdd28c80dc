//! The calls of MPI that the transport makes, with errors as texts.
//!
//! Every caller holds the world's lock where the MPI library wants calls one at a time, and calls only between its start
//! and its end: whoever has a [`Comm`] keeps the world.

use core::{ffi::c_int, mem::MaybeUninit, ptr};

use mpi::ffi;

use crate::DType;

/// A communicator of MPI. It is never freed: the end of MPI does that, and until then late messages may need it.
#[derive(Clone, Copy)]
pub(super) struct Comm(ffi::MPI_Comm);

/// An operation in progress, with a buffer that must stay.
pub(super) struct Request(ffi::MPI_Request);

// SAFETY: a handle, which MPI takes from any thread at the levels that the world demands.
unsafe impl Send for Comm {}
// SAFETY: as above; nothing writes the handle.
unsafe impl Sync for Comm {}
// SAFETY: a handle, which MPI takes from any thread at the levels that the world demands.
unsafe impl Send for Request {}

/// A message that has arrived, or at least its announcement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    pub(super) from: usize,
    pub(super) num_bytes: usize,
}

/// All messages of one communicator have this tag.
const TAG: c_int = 0;

impl Comm {
    /// The communicator of all processes that were launched together.
    pub(super) fn world() -> Self {
        // SAFETY: a constant of the MPI library.
        Self(unsafe { ffi::RSMPI_COMM_WORLD })
    }

    /// A communicator of the same ranks with messages of its own; all ranks ask for it with the same tag.
    pub(super) fn separate(self, tag: usize) -> Result<Self, String> {
        let mut group = MaybeUninit::uninit();
        // SAFETY: MPI has started, and writes the group.
        check(unsafe { ffi::MPI_Comm_group(self.0, group.as_mut_ptr()) })?;
        // SAFETY: the call above has succeeded.
        let mut group = unsafe { group.assume_init() };
        let mut comm = MaybeUninit::uninit();
        let tag = c_int::try_from(tag).unwrap_or(c_int::MAX);
        // SAFETY: MPI has started; the group is of this communicator.
        check(unsafe { ffi::MPI_Comm_create_group(self.0, group, tag, comm.as_mut_ptr()) })?;
        // SAFETY: the group was made above and is not used again.
        check(unsafe { ffi::MPI_Group_free(&raw mut group) })?;
        // SAFETY: the call that made it has succeeded.
        let comm = unsafe { comm.assume_init() };
        // SAFETY: a constant of the MPI library.
        let errors_return = unsafe { ffi::RSMPI_ERRORS_RETURN };
        // SAFETY: a communicator that was just made.
        check(unsafe { ffi::MPI_Comm_set_errhandler(comm, errors_return) })?;
        Ok(Self(comm))
    }

    pub(super) fn rank(self) -> Result<usize, String> {
        let mut rank = 0;
        // SAFETY: MPI has started, and writes one number.
        check(unsafe { ffi::MPI_Comm_rank(self.0, &raw mut rank) })?;
        usize::try_from(rank).map_err(|error| error.to_string())
    }

    pub(super) fn size(self) -> Result<usize, String> {
        let mut size = 0;
        // SAFETY: MPI has started, and writes one number.
        check(unsafe { ffi::MPI_Comm_size(self.0, &raw mut size) })?;
        usize::try_from(size).map_err(|error| error.to_string())
    }

    /// Starts to send.
    ///
    /// # Safety
    ///
    /// Until the request is complete, `bytes` stay and nobody writes them.
    pub(super) unsafe fn send(self, bytes: *const [u8], to: usize) -> Result<Request, String> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: the caller keeps the bytes; MPI writes the request.
        check(unsafe {
            ffi::MPI_Isend(bytes.cast(), count(bytes.len())?, byte(), rank(to)?, TAG, self.0, request.as_mut_ptr())
        })?;
        // SAFETY: the call above has succeeded.
        Ok(Request(unsafe { request.assume_init() }))
    }

    /// Starts to receive.
    ///
    /// # Safety
    ///
    /// Until the request is complete, `bytes` stay and nobody else touches them.
    pub(super) unsafe fn receive(self, bytes: *mut [u8], from: usize) -> Result<Request, String> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: the caller keeps the bytes; MPI writes the request.
        check(unsafe {
            ffi::MPI_Irecv(bytes.cast(), count(bytes.len())?, byte(), rank(from)?, TAG, self.0, request.as_mut_ptr())
        })?;
        // SAFETY: the call above has succeeded.
        Ok(Request(unsafe { request.assume_init() }))
    }

    /// Looks for a message from a rank, or from any.
    pub(super) fn probe(self, from: Option<usize>) -> Result<Option<Found>, String> {
        let from = match from {
            Some(from) => rank(from)?,
            // SAFETY: a constant of the MPI library.
            None => unsafe { ffi::RSMPI_ANY_SOURCE },
        };
        let (mut is_there, mut status) = (0, MaybeUninit::<ffi::MPI_Status>::uninit());
        // SAFETY: MPI has started, and writes the two.
        check(unsafe { ffi::MPI_Iprobe(from, TAG, self.0, &raw mut is_there, status.as_mut_ptr()) })?;
        if is_there == 0 {
            return Ok(None);
        }
        // SAFETY: there is a message, so its status was written.
        let status = unsafe { status.assume_init() };
        let mut num_bytes = 0;
        // SAFETY: the status of a message.
        check(unsafe { ffi::MPI_Get_count(&raw const status, byte(), &raw mut num_bytes) })?;
        let number = |number: c_int| usize::try_from(number).map_err(|error| error.to_string());
        Ok(Some(Found { from: number(status.MPI_SOURCE)?, num_bytes: number(num_bytes)? }))
    }

    /// Starts to sum `given` over all ranks into `sums`.
    ///
    /// # Safety
    ///
    /// Until the request is complete, both stay, nobody writes `given` and nobody touches `sums`. They have the same
    /// length, and hold elements of `dtype`.
    pub(super) unsafe fn sum(self, given: *const [u8], sums: *mut [u8], dtype: DType) -> Result<Request, String> {
        let mut request = MaybeUninit::uninit();
        let num_elements = count(given.len() / dtype.size_bytes())?;
        let kind = float(dtype).ok_or("only f32 and f64 are summed by MPI")?;
        // SAFETY: a constant of the MPI library.
        let op = unsafe { ffi::RSMPI_SUM };
        // SAFETY: the caller keeps both; MPI writes the request.
        check(unsafe {
            ffi::MPI_Iallreduce(given.cast(), sums.cast(), num_elements, kind, op, self.0, request.as_mut_ptr())
        })?;
        // SAFETY: the call above has succeeded.
        Ok(Request(unsafe { request.assume_init() }))
    }
}

impl Request {
    /// Whether the operation is complete; afterwards it stays so.
    pub(super) fn is_complete(&mut self) -> Result<bool, String> {
        let mut is_complete = 0;
        // SAFETY: a constant of the MPI library.
        let ignored = unsafe { ffi::RSMPI_STATUS_IGNORE };
        // SAFETY: a request that was started, or that MPI has set to none when it completed.
        check(unsafe { ffi::MPI_Test(&raw mut self.0, &raw mut is_complete, ignored) })?;
        Ok(is_complete != 0)
    }
}

/// MPI's name for a dtype that it can sum as we do.
fn float(dtype: DType) -> Option<ffi::MPI_Datatype> {
    match dtype {
        // SAFETY: a constant of the MPI library.
        DType::F32 => Some(unsafe { ffi::RSMPI_FLOAT }),
        // SAFETY: a constant of the MPI library.
        DType::F64 => Some(unsafe { ffi::RSMPI_DOUBLE }),
        _ => None,
    }
}

fn byte() -> ffi::MPI_Datatype {
    // SAFETY: a constant of the MPI library.
    unsafe { ffi::RSMPI_UINT8_T }
}

fn rank(rank: usize) -> Result<c_int, String> {
    c_int::try_from(rank).map_err(|error| error.to_string())
}

fn count(length: usize) -> Result<c_int, String> {
    c_int::try_from(length).map_err(|_| format!("{length} elements are too many for one message of MPI"))
}

fn check(code: c_int) -> Result<(), String> {
    if code == 0 {
        return Ok(());
    }
    let (mut text, mut length) = ([0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1], 0);
    // SAFETY: MPI writes a text of at most its longest error.
    let is_known = unsafe { ffi::MPI_Error_string(code, ptr::from_mut(&mut text).cast(), &raw mut length) } == 0;
    let text = text.get(..usize::try_from(length).unwrap_or(0)).filter(|_| is_known);
    Err(text.map_or_else(|| format!("MPI error {code}"), |text| String::from_utf8_lossy(text).into_owned()))
}

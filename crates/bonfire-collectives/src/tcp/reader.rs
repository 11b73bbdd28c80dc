//! The reading side of a connection.

use std::{
    collections::VecDeque,
    io::{self, IoSliceMut, Read},
    net::TcpStream,
};

use super::connection::{Frame, HEADER_BYTES, Kind};
use crate::{Incoming, MAX_NOTICE_BYTES, TransportError, Watch};

/// Small messages and notices are read together, whatever they are.
const BUFFER_BYTES: usize = 64 * 1024;
/// Messages that nobody has asked for yet; what is longer waits in the kernel.
const MAX_EARLY_BYTES: usize = 256 * 1024;

/// What has come from a rank.
#[derive(Default)]
pub(super) struct Reader {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    message: Option<Message>,
    early: VecDeque<Vec<u8>>,
    /// The next message is too long to be kept until it is asked for.
    is_parked: bool,
    closed: Option<Closed>,
}

/// A message of which a part has come.
struct Message {
    /// Of the piece.
    num_left: usize,
    num_bytes: usize,
    /// Where it goes if nobody had asked for it when it began.
    early: Option<Vec<u8>>,
}

/// How a connection ended.
enum Closed {
    Ended,
    Failed(String),
}

/// What one look at a connection brought.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    None,
    /// All that there was.
    Short,
    /// As much as was asked for, so there may be more.
    Full,
    /// The watch wants to stop.
    Stop,
}

/// How far the bytes in the buffer lead.
enum Parsed {
    NeedsMore,
    Parked,
    Stop,
}

impl Reader {
    /// Whether there is a point in reading.
    pub(super) const fn can_read(&self) -> bool {
        self.closed.is_none() && !self.is_parked
    }

    /// # Errors
    ///
    /// [`TransportError::Ended`] or [`TransportError::Failed`] if nothing more can come.
    pub(super) fn check_open(&self, rank: usize) -> Result<(), TransportError> {
        match &self.closed {
            None => Ok(()),
            Some(Closed::Ended) => Err(TransportError::Ended { rank }),
            Some(Closed::Failed(reason)) => Err(TransportError::Failed { rank, reason: reason.clone() }),
        }
    }

    /// Gives out a message that came early; says whether there was one.
    pub(super) fn take_early(&mut self, room: &mut Incoming<'_>) -> Result<bool, TransportError> {
        // Whoever asks may have made room for what is too long to be kept.
        self.is_parked = false;
        if room.is_received {
            return Ok(false);
        }
        let Some(message) = self.early.pop_front() else { return Ok(false) };
        check_fits(room, message.len() as u64)?;
        room.bytes[..message.len()].copy_from_slice(&message);
        (room.num_received, room.is_received) = (message.len(), true);
        Ok(true)
    }

    /// Takes in what has come from `rank`.
    pub(super) fn read(
        &mut self,
        rank: usize,
        stream: &TcpStream,
        incoming: &mut [Incoming<'_>],
        watch: &mut dyn Watch,
    ) -> Result<Progress, TransportError> {
        let mut progress = Progress::None;
        loop {
            match self.parse(rank, incoming, watch)? {
                Parsed::NeedsMore => {}
                Parsed::Parked => self.is_parked = true,
                Parsed::Stop => return Ok(Progress::Stop),
            }
            if !self.can_read() || progress == Progress::Short {
                return Ok(progress);
            }
            match self.fill(rank, stream, incoming) {
                Ok(filled) => progress = filled,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(progress),
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::ConnectionReset
                    | io::ErrorKind::ConnectionAborted
                    | io::ErrorKind::BrokenPipe => self.closed = Some(Closed::Ended),
                    _ => self.closed = Some(Closed::Failed(error.to_string())),
                },
            }
        }
    }

    /// Throws away what has come, at the end.
    pub(super) fn drain(&mut self, stream: &TcpStream) {
        if self.closed.is_none() {
            self.buffer.resize(BUFFER_BYTES, 0);
            while (&mut &*stream).read(&mut self.buffer).is_ok_and(|num_bytes| num_bytes > 0) {}
        }
    }

    /// Reads once: of a message that has been asked for straight to where it goes.
    fn fill(&mut self, rank: usize, stream: &TcpStream, incoming: &mut [Incoming<'_>]) -> io::Result<Progress> {
        if self.buffer.is_empty() {
            self.buffer.resize(BUFFER_BYTES, 0);
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = asked(incoming, rank);
        let is_direct = |message: &&mut Message| message.early.is_none() && message.num_left > 0;
        let Some((message, room)) = self.message.as_mut().filter(is_direct).zip(room) else {
            let asked = &mut self.buffer[self.end..];
            let (num_asked, num_bytes) = (asked.len(), (&mut &*stream).read(asked)?);
            self.end += num_bytes;
            return filled(num_bytes, num_asked);
        };
        // All that was in the buffer has gone to the message.
        let rest = &mut room.bytes[room.num_received..room.num_received + message.num_left];
        let mut slices = [IoSliceMut::new(rest), IoSliceMut::new(&mut self.buffer)];
        let num_asked = slices.iter().map(|slice| slice.len()).sum();
        let num_bytes = (&mut &*stream).read_vectored(&mut slices)?;
        let of_message = num_bytes.min(message.num_left);
        message.num_left -= of_message;
        room.num_received += of_message;
        self.end = num_bytes - of_message;
        filled(num_bytes, num_asked)
    }

    /// Takes in what is in the buffer.
    fn parse(
        &mut self,
        rank: usize,
        incoming: &mut [Incoming<'_>],
        watch: &mut dyn Watch,
    ) -> Result<Parsed, TransportError> {
        let failed = |reason: &str| TransportError::Failed { rank, reason: reason.to_owned() };
        loop {
            if self.message.as_ref().is_some_and(|message| message.num_left > 0) {
                if self.start == self.end {
                    return Ok(Parsed::NeedsMore);
                }
                self.copy_piece(rank, incoming);
            }
            if self.message.as_ref().is_some_and(|message| message.num_left == 0) {
                self.end_piece(rank, incoming, watch)?;
            }
            if self.message.as_ref().is_some_and(|message| message.num_left > 0) {
                continue;
            }
            let Some(header) = self.buffer[self.start..self.end].first_chunk() else { return Ok(Parsed::NeedsMore) };
            let frame = Frame::decode(*header).ok_or_else(|| failed("it sent what is no frame"))?;
            match frame.kind {
                Kind::Notice if frame.num_bytes > MAX_NOTICE_BYTES => return Err(failed("it sent too long a notice")),
                Kind::Notice => {
                    let end = self.start + HEADER_BYTES + frame.num_bytes;
                    if end > self.end {
                        return Ok(Parsed::NeedsMore);
                    }
                    let notice = &self.buffer[self.start + HEADER_BYTES..end];
                    self.start = end;
                    if watch.notice(rank, notice).is_break() {
                        return Ok(Parsed::Stop);
                    }
                }
                Kind::Data => {
                    if !self.begin_piece(rank, frame, incoming)? {
                        return Ok(Parsed::Parked);
                    }
                    self.start += HEADER_BYTES;
                }
            }
        }
    }

    /// Begins a message, or goes on with one; not if it must wait until somebody asks for it.
    fn begin_piece(
        &mut self,
        rank: usize,
        frame: Frame,
        incoming: &mut [Incoming<'_>],
    ) -> Result<bool, TransportError> {
        let room = asked(incoming, rank);
        if let Some(message) = &mut self.message {
            let num_received =
                message.early.as_ref().map_or_else(|| room.map_or(0, |room| room.num_received), Vec::len);
            if frame.message_num_bytes != message.num_bytes as u64 || frame.num_bytes > message.num_bytes - num_received
            {
                return Err(TransportError::Failed { rank, reason: "it sent a piece of another message".into() });
            }
            message.num_left = frame.num_bytes;
            return Ok(true);
        }
        if frame.num_bytes as u64 > frame.message_num_bytes {
            return Err(TransportError::Failed { rank, reason: "it sent more than a message".into() });
        }
        let early = match room {
            Some(room) => {
                check_fits(room, frame.message_num_bytes)?;
                None
            }
            None => {
                let num_early: usize = self.early.iter().map(Vec::len).sum();
                if frame.message_num_bytes > MAX_EARLY_BYTES.saturating_sub(num_early) as u64 {
                    return Ok(false);
                }
                Some(Vec::with_capacity(frame.message_num_bytes as usize))
            }
        };
        let num_bytes = frame.message_num_bytes as usize;
        self.message = Some(Message { num_left: frame.num_bytes, num_bytes, early });
        Ok(true)
    }

    /// Copies what the buffer has of a piece.
    fn copy_piece(&mut self, rank: usize, incoming: &mut [Incoming<'_>]) {
        let Some(message) = &mut self.message else { return };
        let num_bytes = message.num_left.min(self.end - self.start);
        let bytes = &self.buffer[self.start..self.start + num_bytes];
        match (&mut message.early, asked(incoming, rank)) {
            (Some(early), _) => early.extend(bytes),
            (None, Some(room)) => {
                room.bytes[room.num_received..room.num_received + num_bytes].copy_from_slice(bytes);
                room.num_received += num_bytes;
            }
            // It was asked for when it began, and is asked for until it is complete.
            (None, None) => {}
        }
        message.num_left -= num_bytes;
        self.start += num_bytes;
    }

    /// Ends a piece, and the message with the last one.
    fn end_piece(
        &mut self,
        rank: usize,
        incoming: &mut [Incoming<'_>],
        watch: &mut dyn Watch,
    ) -> Result<(), TransportError> {
        let room = asked(incoming, rank);
        let Some(message) = &self.message else { return Ok(()) };
        let in_room = room.as_ref().map_or(0, |room| room.num_received);
        if message.early.as_ref().map_or(in_room, Vec::len) < message.num_bytes {
            return Ok(());
        }
        let early = self.message.take().and_then(|message| message.early);
        let Some(room) = room else {
            self.early.extend(early);
            return Ok(());
        };
        if let Some(early) = early {
            // It was asked for meanwhile.
            check_fits(room, early.len() as u64)?;
            room.bytes[..early.len()].copy_from_slice(&early);
            room.num_received = early.len();
        }
        room.is_received = true;
        watch.arrived(rank, &room.bytes[..room.num_received]);
        Ok(())
    }
}

/// How a read went; 0 bytes are the end.
fn filled(num_bytes: usize, num_asked: usize) -> io::Result<Progress> {
    match num_bytes {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ if num_bytes < num_asked => Ok(Progress::Short),
        _ => Ok(Progress::Full),
    }
}

/// The room for the next message of a rank.
fn asked<'r, 'b>(incoming: &'r mut [Incoming<'b>], rank: usize) -> Option<&'r mut Incoming<'b>> {
    incoming.iter_mut().find(|room| room.from == rank && !room.is_received)
}

fn check_fits(room: &Incoming<'_>, num_bytes: u64) -> Result<(), TransportError> {
    let max = room.bytes.len();
    if num_bytes > max as u64 { Err(TransportError::TooLong { rank: room.from, num_bytes, max }) } else { Ok(()) }
}

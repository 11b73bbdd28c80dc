//! The writing side of a connection.

use std::{
    io::{self, IoSlice, Write},
    net::TcpStream,
};

use super::connection::{Frame, HEADER_BYTES, Kind, MAX_PIECE_BYTES};
use crate::{MAX_NOTICE_BYTES, Outgoing};

/// What is on its way to a rank.
#[derive(Default)]
pub(super) struct Writer {
    /// Whole frames that go out before the next piece, and how much of them has gone.
    queue: Vec<u8>,
    num_gone: usize,
    piece: Option<Piece>,
    is_closed: bool,
}

/// A piece of a message of which a part has gone.
struct Piece {
    header: [u8; HEADER_BYTES],
    header_gone: usize,
    num_left: usize,
}

/// A sign that a socket takes no more for now.
struct Full;

impl Writer {
    /// Whether the rank may still be listening.
    pub(super) const fn is_open(&self) -> bool {
        !self.is_closed
    }

    pub(super) const fn has_queue(&self) -> bool {
        self.num_gone < self.queue.len()
    }

    /// Sends of a message what the socket takes, one piece at most; says whether it took anything.
    ///
    /// A connection that has failed takes nothing more: what is read from it says why.
    pub(super) fn send(&mut self, stream: &TcpStream, message: &mut Outgoing<'_>) -> bool {
        let mut has_sent = false;
        if self.piece.is_none() {
            self.flush(stream);
            if self.has_queue() || self.is_closed {
                return false;
            }
            let num_bytes = (message.bytes.len() - message.num_sent).min(MAX_PIECE_BYTES);
            let frame = Frame { kind: Kind::Data, num_bytes, message_num_bytes: message.bytes.len() as u64 };
            self.piece = Some(Piece { header: frame.encode(), header_gone: 0, num_left: num_bytes });
        }
        while let Some(piece) = &mut self.piece {
            let bytes = &message.bytes[message.num_sent..message.num_sent + piece.num_left];
            let slices = [IoSlice::new(&piece.header[piece.header_gone..]), IoSlice::new(bytes)];
            match attempt(&mut self.is_closed, || (&mut &*stream).write_vectored(&slices)) {
                Err(Full) => return has_sent,
                Ok(num_taken) => {
                    let of_header = num_taken.min(HEADER_BYTES - piece.header_gone);
                    piece.header_gone += of_header;
                    piece.num_left -= num_taken - of_header;
                    message.num_sent += num_taken - of_header;
                    has_sent = true;
                    if piece.num_left == 0 && piece.header_gone == HEADER_BYTES {
                        self.piece = None;
                        message.is_sent = message.num_sent == message.bytes.len();
                    }
                }
            }
        }
        has_sent
    }

    /// Queues a notice, and sends it at once if the socket takes it and no piece is on its way.
    pub(super) fn notify(&mut self, stream: &TcpStream, notice: &[u8]) {
        debug_assert!(notice.len() <= MAX_NOTICE_BYTES, "a notice is short");
        if self.is_closed {
            return;
        }
        let frame = Frame { kind: Kind::Notice, num_bytes: notice.len(), message_num_bytes: 0 };
        self.queue.extend(frame.encode());
        self.queue.extend(notice);
        self.flush(stream);
    }

    /// Fills up the piece that is on its way, since nobody will send the rest of its message.
    pub(super) fn pad(&mut self) {
        if let Some(piece) = self.piece.take() {
            let mut queue = piece.header[piece.header_gone..].to_vec();
            queue.resize(queue.len() + piece.num_left, 0);
            queue.extend_from_slice(&self.queue[self.num_gone..]);
            (self.queue, self.num_gone) = (queue, 0);
        }
    }

    /// Sends of the queue what the socket takes, if no piece is on its way.
    pub(super) fn flush(&mut self, stream: &TcpStream) {
        while self.piece.is_none() && self.has_queue() {
            let queue = &self.queue[self.num_gone..];
            match attempt(&mut self.is_closed, || (&mut &*stream).write(queue)) {
                Ok(num_taken) => self.num_gone += num_taken,
                Err(Full) => return,
            }
        }
        if !self.has_queue() {
            self.queue.clear();
            self.num_gone = 0;
        }
    }
}

/// Tries to write; a connection that fails is closed, and takes no more either.
fn attempt(is_closed: &mut bool, mut write: impl FnMut() -> io::Result<usize>) -> Result<usize, Full> {
    loop {
        match write() {
            Ok(num_taken) if num_taken > 0 => return Ok(num_taken),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(Full),
            Ok(_) | Err(_) => {
                *is_closed = true;
                return Err(Full);
            }
        }
    }
}

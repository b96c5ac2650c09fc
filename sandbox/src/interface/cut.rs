//! Frames with something left to do that a kernel takes only without: cut, and their checksums made, here.
//!
//! Linux refuses super-frames with `EINVAL` that a NIC could do: of UDP, those of more than 64 datagrams
//! (`UDP_MAX_SEGMENTS`, 128 since 6.8), and before 6.2 any.

use rustix::io::Errno;
use vnplug::Offload;
use vnplug_frame::offload::{Pieces, work};

use super::{Tap, header};

/// Gives frames to an interface. It keeps its memory.
#[derive(Debug, Default)]
pub struct Cutter {
    pieces: Pieces,
}

impl Cutter {
    /// Lets the interface receive a frame in this queue, behind its vnet header; in packets, if the kernel takes it
    /// only so.
    ///
    /// # Errors
    /// The driver's, of the first packet that it did not take: [`Reason::of`](super::tally::Reason::of) says what they
    /// mean. The others were given to it all the same.
    #[inline]
    pub fn inject(
        &mut self,
        tap: &Tap,
        queue: usize,
        header: &[u8; header::SIZE],
        frame: &[u8],
    ) -> Result<(), Errno> {
        self.give(header, frame, |header, parts| {
            tap.inject(queue, header, parts)
        })
    }

    #[inline]
    fn give(
        &mut self,
        header: &[u8; header::SIZE],
        frame: &[u8],
        mut put: impl FnMut(&[u8], [&[u8]; 2]) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        match put(header, [frame, &[]]) {
            Err(Errno::INVAL) => self.give_cut(header, frame, put),
            done => done,
        }
    }

    #[cold]
    fn give_cut(
        &mut self,
        header: &[u8; header::SIZE],
        frame: &[u8],
        mut put: impl FnMut(&[u8], [&[u8]; 2]) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let len = frame.len() as u32;
        let offload = Offload::from_native_header(header);
        let Ok(Some(work)) = work(frame, len, &offload) else {
            return Err(Errno::INVAL);
        };
        let mut all = Ok(());
        self.pieces.clear();
        for at in self.pieces.make(frame, len, &work) {
            let piece = self.pieces.get(at, frame);
            all = all.and(put(&[0; header::SIZE], [piece.head, piece.body]));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UDP_L4: u8 = 5;
    const NEEDS_CSUM: u8 = 1;

    /// A super-frame of `datagrams` of 10 bytes each, with the sum of its pseudo header.
    fn super_frame(datagrams: u8) -> (Vec<u8>, Offload) {
        let payload = u16::from(datagrams) * 10;
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0];
        frame.extend((28 + payload).to_be_bytes());
        frame.extend([0, 1, 0x40, 0, 64, 17, 0, 0]);
        frame.extend([0, 0, 0, 1, 0, 0, 0, 2, 0, 7, 0, 9]);
        frame.extend((8 + payload).to_be_bytes());
        frame.extend((1 + 2 + 17 + 8 + payload).to_be_bytes());
        frame.extend((0..payload).map(|at| (at / 10) as u8));
        let offload = Offload {
            flags: NEEDS_CSUM,
            gso_type: UDP_L4,
            gso_size: 10,
            csum_start: 34,
            csum_offset: 6,
        };
        (frame, offload)
    }

    /// A kernel that takes at most `most` datagrams as one frame.
    struct Kernel {
        most: usize,
        has: Vec<(u8, Vec<u8>)>,
    }

    impl Kernel {
        fn put(&mut self, header: &[u8], parts: [&[u8]; 2]) -> Result<(), Errno> {
            let frame = parts.concat();
            if header[1] == UDP_L4 && frame.len() - 42 > self.most * 10 {
                return Err(Errno::INVAL);
            }
            self.has.push((header[1], frame));
            Ok(())
        }
    }

    #[test]
    fn what_a_kernel_refuses_is_cut_for_it_and_nothing_else() {
        let (frame, offload) = super_frame(65);
        let header = offload.to_native_header(&frame);
        for (most, count) in [(128, 1), (65, 1), (64, 65), (0, 65)] {
            let mut kernel = Kernel {
                most,
                has: Vec::new(),
            };
            let mut cutter = Cutter::default();
            let given = cutter.give(&header, &frame, |header, parts| kernel.put(header, parts));
            assert_eq!(given, Ok(()), "{most}");
            assert_eq!(kernel.has.len(), count, "{most}");
            let datagrams = kernel.has.iter();
            let payload: Vec<u8> = datagrams.flat_map(|it| it.1[42..].to_vec()).collect();
            assert_eq!(payload, frame[42..], "{most}");
            if count == 1 {
                assert_eq!(kernel.has[0], (UDP_L4, frame.clone()));
                continue;
            }
            for (kind, datagram) in &kernel.has {
                assert_eq!((*kind, datagram.len()), (0, 52));
                let halves = datagram[26..].chunks(2);
                let sum: u32 = halves
                    .map(|it| u32::from(u16::from_be_bytes([it[0], it[1]])))
                    .sum();
                // The pseudo header's protocol and length.
                assert_eq!((sum + 17 + 18) % 0xffff, 0, "{datagram:02x?}");
            }
        }
    }

    #[test]
    fn other_errors_and_frames_that_cannot_be_cut_are_told() {
        let (frame, offload) = super_frame(3);
        let lie = Offload {
            csum_start: 20,
            ..offload
        };
        for (offload, says, asked) in [
            (offload, Errno::AGAIN, 1),
            (offload, Errno::INVAL, 4),
            (lie, Errno::INVAL, 1),
            (Offload::default(), Errno::INVAL, 1),
        ] {
            let header = offload.to_native_header(&frame);
            let mut count = 0;
            let given = Cutter::default().give(&header, &frame, |_, _| {
                count += 1;
                Err(says)
            });
            assert_eq!((given, count), (Err(says), asked), "{offload:?}");
        }
        // A packet that is not taken is told of, and the others are given.
        let header = offload.to_native_header(&frame);
        let mut count = 0;
        let given = Cutter::default().give(&header, &frame, |_, _| {
            count += 1;
            match count {
                1 => Err(Errno::INVAL),
                3 => Err(Errno::NOBUFS),
                _ => Ok(()),
            }
        });
        assert_eq!((given, count), (Err(Errno::NOBUFS), 4));
    }
}

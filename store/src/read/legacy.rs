//! Classic pcap files.

use vnplug_frame::capfile::classic::{Classic, HEADER_BYTES};
use vnplug_frame::capfile::{Bad, Clock, Record};

use super::input::Input;
use super::{End, Found, Interface, MAX_BLOCK_BYTES, Problem, Step};

/// Reads the file's header, which begins with `magic`; `None` if the file ends in it.
pub(super) fn begin(
    input: &mut Input,
    magic: [u8; 4],
) -> Result<Option<(Classic, Interface)>, Problem> {
    const NEITHER: &str = "neither pcapng nor pcap";
    if !Classic::is_magic(&magic) {
        return Err(Bad::new(0, NEITHER).into());
    }
    let Some(start) = input.peek(HEADER_BYTES)? else {
        return Ok(None);
    };
    let file = Classic::parse(start)?.ok_or_else(|| Bad::new(0, NEITHER))?;
    let interface = Interface {
        // The upper bits tell of frame check sequences.
        link_type: file.link & 0xffff,
        snaplen: file.snaplen,
        name: String::new(),
        clock: Clock::NANOS,
    };
    input.take(HEADER_BYTES);
    Ok(Some((file, interface)))
}

pub(super) fn step(file: &Classic, input: &mut Input) -> Result<Step, Problem> {
    let (offset, header) = (input.offset(), file.record_bytes);
    let Some(head) = input.peek(header)? else {
        let end = if input.buffered() == 0 {
            End::Clean
        } else {
            End::Torn(offset)
        };
        return Ok(Step::End(end));
    };
    if head.iter().all(|&byte| byte == 0) {
        return Ok(Step::End(End::Unwritten(offset)));
    }
    if head.iter().all(|&byte| byte == 0xff) && is_padding(input, offset)? {
        return Ok(Step::End(End::Torn(offset)));
    }
    // NB: what lies behind may have moved the buffer.
    let Some(head) = input.peek(header)? else {
        return Ok(Step::End(End::Torn(offset)));
    };
    let Record {
        cap_len,
        wire_len,
        ts_ns,
    } = file.record(head);
    let len = cap_len as usize;
    if len > MAX_BLOCK_BYTES {
        return Err(Bad::new(8, "packet of more than 16 MiB").into());
    }
    if input.peek(header + len)?.is_none() {
        return Ok(Step::End(End::Torn(offset)));
    }
    input.take(header + len);
    Ok(Step::Packet(Found {
        ts_ns,
        wire_len,
        interface: 0,
        flags: 0,
        lost: 0,
        offset,
        skip: header,
        len,
    }))
}

/// Whether this is what a recorder writes after the end of a file until it has cut it there, and what
/// stays if it is killed before: ones up to the end of the disk's block, then nothing or zeros.
fn is_padding(input: &mut Input, offset: u64) -> Result<bool, Problem> {
    let len = (offset.next_multiple_of(DISK_BLOCK) - offset) as usize;
    let seen = match input.peek(len + BEHIND)? {
        Some(seen) => seen,
        None => input.rest(),
    };
    let (ones, behind) = seen.split_at(len.min(seen.len()));
    let is = |bytes: &[u8], what| bytes.iter().all(|&byte| byte == what);
    Ok(len > 0 && is(ones, 0xff) && is(behind, 0))
}

/// What the recorder's writes are a multiple of.
const DISK_BLOCK: u64 = 4096;
/// The most of what follows that is looked at.
const BEHIND: usize = 64;

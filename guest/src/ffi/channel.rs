//! Programs' channels to third parties' back-ends, and the list of those.
#![expect(unsafe_code, reason = "the C ABI's island")]

use std::ffi::{CString, c_char, c_int};
use std::ptr;

use super::backend::{
    BACK, CMemory, CNews, EVENT, GONE, Handle, MESSAGE, SHARED, WITHDRAW, Words, event_number,
    given, limit, show,
};
use super::error::{E_INVALID, c_string, guarded, number, tell, text};
use super::options::read_sized;
use crate::{BackendInfo, Channel, ChannelOptions, Error, Told};

/// `vnplug_channel`.
pub(crate) type CChannel = Handle<Channel>;

/// `struct vnplug_channel_options`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CChannelOptions {
    pub(super) size: usize,
    pub(super) name: *const c_char,
    pub(super) label: *const c_char,
    pub(super) socket: *const c_char,
    pub(super) id: u32,
    pub(super) version: u32,
    pub(super) wait: u32,
    pub(super) reserved: u32,
}

/// `struct vnplug_backend_info`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CBackendInfo {
    pub(super) name: *mut c_char,
    pub(super) id: u32,
    pub(super) is_there: u32,
    pub(super) version: u32,
    pub(super) channels: u32,
}

/// See `vnplug.h`.
///
/// # Safety
/// `options` is null or points to `options->size` bytes, its strings end with 0; `errbuf` is null or points
/// to `errlen` bytes; `out` is null or may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_channel_open(
    options: *const CChannelOptions,
    errbuf: *mut c_char,
    errlen: usize,
    out: *mut *mut CChannel,
) -> c_int {
    let open = || {
        // SAFETY: the caller's promise; zeros are numbers and null pointers.
        let options = unsafe { read_sized(options) }?;
        if options.reserved != 0 {
            return Err(Error::Invalid(
                "options.reserved: use vnplug_channel_options_init",
            ));
        }
        // SAFETY: the strings end with 0, by the caller's promise.
        let (name, label, socket) = unsafe {
            (
                text(options.name, "name is not UTF-8")?,
                text(options.label, "label is not UTF-8")?,
                text(options.socket, "socket is not UTF-8")?,
            )
        };
        let mut channel = match (name, options.id) {
            (Some(name), 0) => ChannelOptions::new(name),
            (None, id) if id != 0 => ChannelOptions::by_id(id),
            _ => return Err(Error::Invalid("name and id: set one of them")),
        }
        .version(options.version);
        if let Some(label) = label {
            channel = channel.label(label);
        }
        if let Some(socket) = socket {
            channel = channel.socket(socket);
        }
        match options.wait {
            0 => channel.open(),
            _ => channel.open_when_there(),
        }
    };
    // SAFETY: the caller's promises about `errbuf` and `out` are passed on.
    unsafe { Handle::hand_out(open, errbuf, errlen, out) }
}

/// See `vnplug.h`.
///
/// # Safety
/// `channel` is null or open and not in use by another thread; `news` is null or points to `news->size`
/// bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_channel_next(
    channel: *mut CChannel,
    timeout_ms: c_int,
    news: *mut CNews,
) -> c_int {
    let next = |channel: &mut Channel| {
        let told = channel.next(limit(timeout_ms))?;
        Ok(told.map(news_of))
    };
    // SAFETY: the caller's promises.
    unsafe { Handle::give_news(channel, news, next) }
}

/// See `vnplug.h`.
///
/// # Safety
/// `channel` is null or open and not in use by another thread; `bytes` is null or points to `len` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_channel_send(
    channel: *mut CChannel,
    bytes: *const u8,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promises.
    let (handle, bytes) = unsafe { (channel.as_mut(), given(bytes, len)) };
    Handle::status(handle, |channel| channel.send(bytes?))
}

/// See `vnplug.h`.
///
/// # Safety
/// `channel` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_channel_event(
    channel: *mut CChannel,
    event: u32,
    count: u64,
) -> c_int {
    // SAFETY: the caller's promise.
    let handle = unsafe { channel.as_mut() };
    Handle::status(handle, |channel| channel.event(event_number(event)?, count))
}

/// See `vnplug.h`.
///
/// # Safety
/// `channel` is null or open and not in use by another thread; `memory` is null or may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_channel_memory(
    channel: *mut CChannel,
    region: u32,
    memory: *mut CMemory,
) -> c_int {
    // SAFETY: the caller's promise.
    let handle = unsafe { channel.as_mut() };
    Handle::status(handle, |channel| {
        // SAFETY: the caller's promise is passed on.
        unsafe { show(channel.memory(region), memory) }
    })
}

/// See `vnplug.h`.
///
/// # Safety
/// `channel` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_channel_release(
    channel: *mut CChannel,
    region: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    let handle = unsafe { channel.as_mut() };
    Handle::status(handle, |channel| channel.release(region))
}

/// See `vnplug.h`.
///
/// # Safety
/// `channel` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_channel_version(channel: *const CChannel) -> u32 {
    // SAFETY: the caller's promise.
    let handle = unsafe { channel.as_ref() };
    handle
        .and_then(|handle| handle.look().peer())
        .map_or(0, |peer| peer.version)
}

/// See `vnplug.h`.
///
/// # Safety
/// `channel` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_channel_fd(channel: *const CChannel) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { channel.as_ref() }.map_or(E_INVALID, Handle::fd)
}

/// See `vnplug.h`.
///
/// # Safety
/// `channel` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_channel_last_error(
    channel: *const CChannel,
) -> *const c_char {
    // SAFETY: the caller's promise.
    let handle = unsafe { channel.as_ref() };
    handle.map_or(c"the channel is NULL".as_ptr(), Handle::last_error)
}

/// See `vnplug.h`.
///
/// # Safety
/// `channel` is null or open and not in use by another thread; it is not used afterwards.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_channel_close(channel: *mut CChannel) {
    // SAFETY: the caller's promise.
    unsafe { Handle::close(channel) }
}

/// See `vnplug.h`.
///
/// # Safety
/// `socket` is null or ends with 0; `errbuf` is null or points to `errlen` bytes; `back_ends` and `count` are
/// null or may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_backends(
    socket: *const c_char,
    errbuf: *mut c_char,
    errlen: usize,
    back_ends: *mut *mut CBackendInfo,
    count: *mut usize,
) -> c_int {
    if back_ends.is_null() || count.is_null() {
        return E_INVALID;
    }
    let listed = guarded(|| {
        // SAFETY: the caller's promise.
        let socket = unsafe { text(socket, "socket is not UTF-8") }?;
        Channel::list_of(socket.map(std::path::Path::new))
    });
    let (status, len, first) = match listed {
        Ok(list) => {
            let all: Box<[CBackendInfo]> = list.iter().map(CBackendInfo::of).collect();
            (0, all.len(), Box::into_raw(all).cast())
        }
        Err(error) => {
            // SAFETY: the caller's promise about `errbuf` is passed on.
            unsafe { tell(&error, errbuf, errlen) };
            (number(&error), 0, ptr::null_mut())
        }
    };
    // SAFETY: not null, and may be written by the caller's promise.
    unsafe {
        count.write(len);
        back_ends.write(first);
    }
    status
}

/// See `vnplug.h`.
///
/// # Safety
/// `back_ends` is null or came from `vnplug_backends` together with `count`, and was not freed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_backends_free(back_ends: *mut CBackendInfo, count: usize) {
    if back_ends.is_null() {
        return;
    }
    // SAFETY: the slice and its strings came from `into_raw` in `vnplug_backends`.
    unsafe {
        let all = Box::from_raw(ptr::slice_from_raw_parts_mut(back_ends, count));
        all.iter().for_each(|it| drop(CString::from_raw(it.name)));
    }
}

impl CBackendInfo {
    /// The same with a text of its own, which `vnplug_backends_free` frees.
    fn of(info: &BackendInfo) -> Self {
        Self {
            name: c_string(&info.name).into_raw(),
            id: info.id,
            is_there: info.is_there.into(),
            version: info.version,
            channels: info.channels,
        }
    }
}

/// What a program was told, as C says it.
fn news_of(told: Told) -> (CNews, Words) {
    let (mut news, mut words) = (CNews::of(0), Words::default());
    match told {
        Told::Message(bytes) => (news.kind, words.bytes) = (MESSAGE, bytes),
        Told::Event { event, count } => {
            (news.kind, news.event, news.count) = (EVENT, event.into(), count);
        }
        Told::Shared { region } => (news.kind, news.region) = (SHARED, region),
        Told::Withdraw { region, within } => {
            (news.kind, news.region) = (WITHDRAW, region);
            news.within_ms = u32::try_from(within.as_millis()).unwrap_or(u32::MAX);
        }
        Told::Gone(reason) => (news.kind, words.text) = (GONE, reason),
        Told::Back => news.kind = BACK,
    }
    (news, words)
}

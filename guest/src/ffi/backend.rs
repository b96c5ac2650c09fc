//! Third parties' back-ends, and what both ends of a channel have in common: their handles and their news.
#![expect(unsafe_code, reason = "the C ABI's island")]

use std::ffi::{CString, c_char, c_int};
use std::os::fd::{AsFd, AsRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::time::Duration;

use super::error::{E_INVALID, Text, c_string, describe, guarded, number, tell, text};
use super::options::{read_sized, write_sized};
use crate::{BackEnd, BackEndOptions, Error, Heard, SharedMemory};

/// `vnplug_backend` and `vnplug_channel`.
#[derive(Debug)]
pub(crate) struct Handle<T> {
    inner: T,
    error: Text,
    /// What the last news points to.
    bytes: Vec<u8>,
    text: CString,
    label: CString,
}

/// `vnplug_backend`.
pub(crate) type CBackEnd = Handle<BackEnd>;

/// `struct vnplug_backend_options`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CBackEndOptions {
    pub(super) size: usize,
    pub(super) name: *const c_char,
    pub(super) socket: *const c_char,
    pub(super) id: u32,
    pub(super) version: u32,
    pub(super) events_in: u32,
    pub(super) events_out: u32,
}

/// `struct vnplug_news`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CNews {
    pub(super) size: usize,
    pub(super) kind: u32,
    pub(super) channel: u32,
    pub(super) event: u32,
    pub(super) region: u32,
    pub(super) count: u64,
    pub(super) version: u32,
    pub(super) within_ms: u32,
    pub(super) bytes: *const u8,
    pub(super) len: usize,
    pub(super) text: *const c_char,
    pub(super) label: *const c_char,
}

/// `struct vnplug_memory`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CMemory {
    pub(super) data: *mut u8,
    pub(super) len: u64,
    pub(super) writable: u32,
    pub(super) reserved: u32,
}

/// What a news says besides its numbers.
#[derive(Debug, Default)]
pub(super) struct Words {
    pub(super) bytes: Vec<u8>,
    pub(super) text: String,
    pub(super) label: String,
}

pub(super) const JOINED: u32 = 1;
pub(super) const MESSAGE: u32 = 2;
pub(super) const EVENT: u32 = 3;
pub(super) const LEFT: u32 = 4;
pub(super) const GONE: u32 = 5;
pub(super) const BACK: u32 = 6;
pub(super) const SHARED: u32 = 7;
pub(super) const WITHDRAW: u32 = 8;
pub(super) const RELEASED: u32 = 9;

/// See `vnplug.h`.
///
/// # Safety
/// `options` is null or points to `options->size` bytes, its strings end with 0; `errbuf` is null or points
/// to `errlen` bytes; `out` is null or may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_backend_register(
    options: *const CBackEndOptions,
    errbuf: *mut c_char,
    errlen: usize,
    out: *mut *mut CBackEnd,
) -> c_int {
    let register = || {
        // SAFETY: the caller's promise; zeros are numbers and null pointers.
        let options = unsafe { read_sized(options) }?;
        // SAFETY: the strings end with 0, by the caller's promise.
        let (name, socket) = unsafe {
            (
                text(options.name, "name is not UTF-8")?,
                text(options.socket, "socket is not UTF-8")?,
            )
        };
        let events = |count: u32| {
            let count = u8::try_from(count).ok();
            count.ok_or(Error::Invalid("a back-end has at most 32 events each way"))
        };
        let name = name.ok_or(Error::Invalid("name is NULL"))?;
        let back_end = BackEndOptions::new(options.id, name)
            .version(options.version)
            .events(events(options.events_in)?, events(options.events_out)?);
        match socket {
            Some(socket) => back_end.socket(socket),
            None => back_end,
        }
        .register()
    };
    // SAFETY: the caller's promises about `errbuf` and `out` are passed on.
    unsafe { Handle::hand_out(register, errbuf, errlen, out) }
}

/// See `vnplug.h`.
///
/// # Safety
/// `back_end` is null or open and not in use by another thread; `news` is null or points to `news->size`
/// bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_backend_next(
    back_end: *mut CBackEnd,
    timeout_ms: c_int,
    news: *mut CNews,
) -> c_int {
    let next = |back_end: &mut BackEnd| {
        let heard = back_end.next(limit(timeout_ms))?;
        Ok(heard.map(news_of))
    };
    // SAFETY: the caller's promises.
    unsafe { Handle::give_news(back_end, news, next) }
}

/// See `vnplug.h`.
///
/// # Safety
/// `back_end` is null or open and not in use by another thread; `bytes` is null or points to `len` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_backend_send(
    back_end: *mut CBackEnd,
    channel: u32,
    bytes: *const u8,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promises.
    let (handle, bytes) = unsafe { (back_end.as_mut(), given(bytes, len)) };
    Handle::status(handle, |back_end| back_end.send(channel, bytes?))
}

/// See `vnplug.h`.
///
/// # Safety
/// `back_end` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_backend_event(
    back_end: *mut CBackEnd,
    channel: u32,
    event: u32,
    count: u64,
) -> c_int {
    // SAFETY: the caller's promise.
    let handle = unsafe { back_end.as_mut() };
    Handle::status(handle, |back_end| {
        back_end.event(channel, event_number(event)?, count)
    })
}

/// See `vnplug.h`.
///
/// # Safety
/// `back_end` is null or open and not in use by another thread; `region` is null or may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_backend_share(
    back_end: *mut CBackEnd,
    channel: u32,
    bytes: u64,
    writable: c_int,
    region: *mut u32,
) -> c_int {
    if region.is_null() {
        return E_INVALID;
    }
    // SAFETY: the caller's promise.
    let handle = unsafe { back_end.as_mut() };
    Handle::status(handle, |back_end| {
        let number = back_end.share(channel, bytes, writable != 0)?;
        // SAFETY: not null, and may be written by the caller's promise.
        unsafe { region.write(number) };
        Ok(())
    })
}

/// See `vnplug.h`.
///
/// # Safety
/// `back_end` is null or open and not in use by another thread; `memory` is null or may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_backend_memory(
    back_end: *mut CBackEnd,
    region: u32,
    memory: *mut CMemory,
) -> c_int {
    // SAFETY: the caller's promise.
    let handle = unsafe { back_end.as_mut() };
    Handle::status(handle, |back_end| {
        // SAFETY: the caller's promise is passed on.
        unsafe { show(back_end.memory(region), memory) }
    })
}

/// See `vnplug.h`.
///
/// # Safety
/// `back_end` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_backend_withdraw(
    back_end: *mut CBackEnd,
    region: u32,
    within_ms: u32,
) -> c_int {
    let within = Duration::from_millis(within_ms.into());
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { back_end.as_mut() }) else {
        return E_INVALID;
    };
    let withdrawn = handle.attempt(|back_end| back_end.withdraw(region, within));
    withdrawn.map_or_else(|status| status, c_int::from)
}

/// See `vnplug.h`.
///
/// # Safety
/// `back_end` is null or open and not in use by another thread; `reason` is null or ends with 0.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_backend_hang_up(
    back_end: *mut CBackEnd,
    channel: u32,
    reason: *const c_char,
) -> c_int {
    // SAFETY: the caller's promises.
    let (handle, reason) = unsafe { (back_end.as_mut(), text(reason, "reason is not UTF-8")) };
    Handle::status(handle, |back_end| {
        back_end.hang_up(channel, reason?.unwrap_or(""))
    })
}

/// See `vnplug.h`.
///
/// # Safety
/// `back_end` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_backend_fd(back_end: *const CBackEnd) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { back_end.as_ref() }.map_or(E_INVALID, Handle::fd)
}

/// See `vnplug.h`.
///
/// # Safety
/// `back_end` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_backend_last_error(
    back_end: *const CBackEnd,
) -> *const c_char {
    // SAFETY: the caller's promise.
    let handle = unsafe { back_end.as_ref() };
    handle.map_or(c"the back-end is NULL".as_ptr(), Handle::last_error)
}

/// See `vnplug.h`.
///
/// # Safety
/// `back_end` is null or open and not in use by another thread; it is not used afterwards.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_backend_close(back_end: *mut CBackEnd) {
    // SAFETY: the caller's promise.
    unsafe { Handle::close(back_end) }
}

impl<T> Handle<T> {
    /// Opens something and gives it to the program, or says why not.
    ///
    /// # Safety
    /// `errbuf` is null or points to `errlen` bytes; `out` is null or may be written.
    pub(super) unsafe fn hand_out(
        open: impl FnOnce() -> Result<T, Error>,
        errbuf: *mut c_char,
        errlen: usize,
        out: *mut *mut Self,
    ) -> c_int {
        if out.is_null() {
            return E_INVALID;
        }
        let (status, handle) = match guarded(open) {
            Ok(inner) => (
                0,
                Box::into_raw(Box::new(Self {
                    inner,
                    error: Text::default(),
                    bytes: Vec::new(),
                    text: CString::default(),
                    label: CString::default(),
                })),
            ),
            Err(error) => {
                // SAFETY: the caller's promise about `errbuf` is passed on.
                unsafe { tell(&error, errbuf, errlen) };
                (number(&error), ptr::null_mut())
            }
        };
        // SAFETY: not null, and may be written by the caller's promise.
        unsafe { out.write(handle) };
        status
    }

    /// Runs `call`, remembers its error's text and returns its number.
    pub(super) fn attempt<V>(
        &mut self,
        call: impl FnOnce(&mut T) -> Result<V, Error>,
    ) -> Result<V, c_int> {
        guarded(|| call(&mut self.inner)).map_err(|error| {
            self.error.set(&describe(&error));
            number(&error)
        })
    }

    pub(super) fn status(
        handle: Option<&mut Self>,
        call: impl FnOnce(&mut T) -> Result<(), Error>,
    ) -> c_int {
        handle.map_or(E_INVALID, |handle| handle.attempt(call).err().unwrap_or(0))
    }

    /// Tells a program what happened, and keeps what that points to.
    ///
    /// # Safety
    /// `handle` is null or open and not in use by another thread; `news` is null or points to `news->size`
    /// bytes.
    pub(super) unsafe fn give_news(
        handle: *mut Self,
        news: *mut CNews,
        next: impl FnOnce(&mut T) -> Result<Option<(CNews, Words)>, Error>,
    ) -> c_int {
        // SAFETY: the caller's promise. Looked at before anything is taken that could then not be told.
        let (handle, sized) = unsafe { (handle.as_mut(), write_sized(news, &CNews::of(0))) };
        let (Some(handle), true) = (handle, sized) else {
            return E_INVALID;
        };
        let (mut full, words) = match handle.attempt(next) {
            Ok(Some(heard)) => heard,
            Ok(None) => return 0,
            Err(status) => return status,
        };
        handle.bytes = words.bytes;
        handle.text = c_string(&words.text);
        handle.label = c_string(&words.label);
        full.bytes = handle.bytes.as_ptr();
        full.len = handle.bytes.len();
        full.text = handle.text.as_ptr();
        full.label = handle.label.as_ptr();
        // SAFETY: as above.
        unsafe { write_sized(news, &full) };
        1
    }

    pub(super) fn look(&self) -> &T {
        &self.inner
    }

    pub(super) fn last_error(&self) -> *const c_char {
        self.error.as_ptr()
    }

    pub(super) fn fd(&self) -> c_int
    where
        T: AsFd,
    {
        self.inner.as_fd().as_raw_fd()
    }

    /// # Safety
    /// `handle` is null or open and not in use by another thread; it is not used afterwards.
    pub(super) unsafe fn close(handle: *mut Self) {
        if !handle.is_null() {
            // SAFETY: the caller's promise. It came from Box::into_raw, and is given back once.
            let handle = unsafe { Box::from_raw(handle) };
            // Nobody is left to be told of a panic.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(handle)));
        }
    }
}

impl CNews {
    pub(super) fn of(kind: u32) -> Self {
        Self {
            size: size_of::<Self>(),
            kind,
            channel: 0,
            event: 0,
            region: 0,
            count: 0,
            version: 0,
            within_ms: 0,
            bytes: ptr::null(),
            len: 0,
            text: c"".as_ptr(),
            label: c"".as_ptr(),
        }
    }
}

/// What a back-end heard, as C says it.
fn news_of(heard: Heard) -> (CNews, Words) {
    let (mut news, mut words) = (CNews::of(0), Words::default());
    match heard {
        Heard::Joined {
            channel,
            who,
            label,
            version,
        } => {
            (news.kind, news.channel, news.version) = (JOINED, channel, version);
            (words.text, words.label) = (who, label);
        }
        Heard::Message { channel, bytes } => {
            (news.kind, news.channel, words.bytes) = (MESSAGE, channel, bytes);
        }
        Heard::Event {
            channel,
            event,
            count,
        } => {
            (news.kind, news.channel) = (EVENT, channel);
            (news.event, news.count) = (event.into(), count);
        }
        Heard::Released { channel, region } => {
            (news.kind, news.channel, news.region) = (RELEASED, channel, region);
        }
        Heard::Left { channel, reason } => {
            (news.kind, news.channel, words.text) = (LEFT, channel, reason);
        }
        Heard::Gone(reason) => (news.kind, words.text) = (GONE, reason),
        Heard::Back => news.kind = BACK,
    }
    (news, words)
}

/// A time limit in milliseconds; less than 0 is none.
pub(super) fn limit(timeout_ms: c_int) -> Option<Duration> {
    u64::try_from(timeout_ms).ok().map(Duration::from_millis)
}

pub(super) fn event_number(event: u32) -> Result<u8, Error> {
    u8::try_from(event).map_err(|_| Error::Invalid("no such event"))
}

/// What a program says.
///
/// # Safety
/// `bytes` is null or points to `len` bytes, and stays for `'a`.
pub(super) unsafe fn given<'a>(bytes: *const u8, len: usize) -> Result<&'a [u8], Error> {
    match (bytes.is_null(), len) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Error::Invalid("bytes is NULL")),
        // More than a slice may have is more than a message may have.
        (false, len) if len > crate::MAX_SAID => {
            Err(Error::Invalid("a message has at most 65,536 bytes"))
        }
        // SAFETY: not null; the caller's promise.
        (false, len) => Ok(unsafe { std::slice::from_raw_parts(bytes, len) }),
    }
}

/// Says where shared memory is mapped.
///
/// # Safety
/// `out` is null or may be written.
pub(super) unsafe fn show(memory: Option<&SharedMemory>, out: *mut CMemory) -> Result<(), Error> {
    if out.is_null() {
        return Err(Error::Invalid("memory is NULL"));
    }
    let memory = memory.ok_or(Error::Invalid("no shared memory has this number"))?;
    let shown = CMemory {
        data: memory.as_ptr(),
        len: memory.len(),
        writable: memory.is_writable().into(),
        reserved: 0,
    };
    // SAFETY: not null, and may be written by the caller's promise.
    unsafe { out.write(shown) };
    Ok(())
}

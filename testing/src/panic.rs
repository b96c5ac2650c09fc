//! What a test lets panic.

use std::panic::{UnwindSafe, catch_unwind, set_hook, take_hook};

/// What this panics with, if it does; `""` of a payload that is no text. Nothing is printed, by other threads neither, for a
/// process has one hook.
///
/// ```
/// use vnplug_testing::panic_of;
/// assert_eq!(panic_of(|| panic!("{} left", 3)).as_deref(), Some("3 left"));
/// assert_eq!(panic_of(|| ()), None);
/// ```
pub fn panic_of(what: impl FnOnce() + UnwindSafe) -> Option<String> {
    let hook = take_hook();
    set_hook(Box::new(|_| {}));
    let went = catch_unwind(what);
    set_hook(hook);
    let why = went.err()?;
    let text = why.downcast_ref::<&str>().map(|it| (*it).to_owned());
    let text = text.or_else(|| why.downcast_ref::<String>().cloned());
    Some(text.unwrap_or_default())
}

//! The daemon's executable.
use std::process::ExitCode;

fn main() -> ExitCode {
    if std::env::args_os()
        .nth(1)
        .is_some_and(|arg| arg == vnplugd::filter::COMPILE_FILTER_ARG)
    {
        return vnplugd::filter::compile_child_main();
    }
    ExitCode::SUCCESS
}

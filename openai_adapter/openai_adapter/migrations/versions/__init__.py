"""One module for each version. A version that was released is never changed: add the next one."""
